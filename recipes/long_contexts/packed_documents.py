"""Speed of packed documents: the same documents in packed rows and in padded ones, forward and backward.

    python -m recipes.long_contexts.packed_documents

It measures the process's CPU time in one thread, which other load on the machine changes little.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fairseq_plugin  # noqa: F401  registers the models

from .. import models

EOS, PAD, FIRST_WORD, WORDS = 2, 1, 4, 1000
SHORTEST, LONGEST = 16, 2048
#: Width, heads and layers of every model.
WIDTH, HEADS, LAYERS = 256, 4, 2


def documents_of(tokens: int) -> list[Tensor]:
    """Documents with ``tokens`` random words in total, each after an eos, as a language model reads them.

    Their lengths are log-uniform from ``SHORTEST`` to ``LONGEST``.
    """
    torch.manual_seed(1)
    documents, remaining, generator = [], tokens, random.Random(1)
    while remaining > 0:
        length = int(math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST + 1))))
        length = min(length, remaining)
        documents.append(F.pad(torch.randint(FIRST_WORD, WORDS, (length - 1,)), (1, 0), value=EOS))
        remaining -= length
    return documents


def padded_rows(documents: list[Tensor], most: int) -> list[Tensor]:
    """A row for each document, in their order; batches of at most ``most`` tokens with padding."""
    batches: list[list[Tensor]] = [[]]
    for document in documents:
        rows = [*batches[-1], document]
        if batches[-1] and max(map(len, rows)) * len(rows) > most:
            batches.append([document])
        else:
            batches[-1] = rows
    return [nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD) for rows in batches]


def build(arch: str, row: int, *flags: str) -> nn.Module:
    """A model of the architecture with fairseq's initial weights."""
    size = f"--decoder-layers {LAYERS} --decoder-embed-dim {WIDTH} --decoder-input-dim {WIDTH} --dropout 0"
    size += f" --decoder-output-dim {WIDTH} --decoder-ffn-embed-dim {2 * WIDTH} --share-decoder-input-output-embed"
    size += "" if arch.startswith("flash") else f" --decoder-attention-heads {HEADS}"
    torch.manual_seed(1)
    words = ["--task", "language_modeling", "--arch", arch, "--tokens-per-sample", row, *flags, *size.split()]
    return models.build(words, models.dictionary_of(WORDS)).train()


def pass_over(model: nn.Module, batches: list[Tensor]) -> Callable[[], None]:
    """Forward and backward passes over all batches."""

    def run() -> None:
        for batch in batches:
            logits = model(batch)[0]
            F.cross_entropy(logits.flatten(0, 1), batch.flatten(), ignore_index=PAD).backward()

    return run


def tokens_per_second(calls: dict[str, Callable[[], None]], tokens: int, rounds: int) -> dict[str, str]:
    """The median of tokens per second of CPU time of each call; calls take turns, after a round to warm up."""
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    for i in tqdm(range(rounds + 1), desc="rounds", unit="", leave=False, disable=None):
        for name, call in calls.items():
            started = time.process_time()
            call()
            if i:
                speeds[name].append(tokens / (time.process_time() - started))
    return {name: f"{statistics.median(found):,.0f}" for name, found in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    known = sorted(name.removesuffix("_lm") for name in ARCH_MODEL_REGISTRY if name.endswith("_lm"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = ["flowformer", "linear", "gla", "flash", "softmax"]
    parser.add_argument("--models", nargs="+", choices=known, default=usual, metavar="NAME", help="without _lm")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of all documents together")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; their median is printed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    documents = documents_of(options.tokens)
    packed, padded = [torch.cat(documents).view(-1, options.row)], padded_rows(documents, options.tokens)
    by_length = padded_rows(sorted(documents, key=len), options.tokens)
    sizes = [sum(batch.numel() for batch in batches) for batches in (padded, by_length)]
    print(f"{len(documents)} documents, {options.tokens} tokens; with padding {sizes[0]}, by length {sizes[1]}\n")
    rows = []
    for name in options.models:
        apart = build(f"{name}_lm", options.row, "--lineartime-reset-at-eos")
        together = build(f"{name}_lm", options.row)
        calls = {
            "packed, apart": pass_over(apart, packed),
            "padded": pass_over(together, padded),
            "padded, sorted by length": pass_over(together, by_length),
            "packed, not apart": pass_over(together, packed),
        }
        rows.append({"model": f"{name}_lm", **tokens_per_second(calls, options.tokens, options.rounds)})
    print(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


if __name__ == "__main__":
    main()
