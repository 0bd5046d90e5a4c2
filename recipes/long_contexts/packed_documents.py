"""Speed of packed documents: the same documents in packed rows and in padded ones, forward and backward.

    python -m recipes.long_contexts.packed_documents
    python -m recipes.long_contexts.packed_documents --functions

It prints a table of models; with --functions, the times of two attention functions, also with gates that forget. It
measures the process's CPU time in one thread, which other load on the machine changes little.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from fairseq import options, tasks
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fairseq_plugin  # noqa: F401  registers the models
from common.command_parser import CommandParser
from common.ops import flow_attention, linear_attention

from ..shared.architectures import architectures_of
from ..shared.scripts import script

EOS, PAD, FIRST_WORD, WORDS = 2, 1, 4, 1000
SHORTEST, LONGEST = 16, 2048
#: Width, heads and layers of every model.
WIDTH, HEADS, LAYERS = 256, 4, 2


def lengths_of(tokens: int, seed: int) -> list[int]:
    """Lengths of documents with ``tokens`` tokens in total, log-uniform from ``SHORTEST`` to ``LONGEST``."""
    lengths, remaining, generator = [], tokens, random.Random(seed)
    while remaining > 0:
        length = int(math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST + 1))))
        lengths.append(min(length, remaining))
        remaining -= lengths[-1]
    return lengths


def documents_of(tokens: int, seed: int) -> list[Tensor]:
    """Documents of random words, each after an eos, as a language model reads them."""
    torch.manual_seed(seed)
    return [
        F.pad(torch.randint(FIRST_WORD, WORDS, (length - 1,)), (1, 0), value=EOS) for length in lengths_of(tokens, seed)
    ]


def packed_rows(documents: list[Tensor], row: int) -> list[Tensor]:
    """One batch of rows of ``row`` tokens, cut where a row is full."""
    return [torch.cat(documents).view(-1, row)]


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
    command = ["data", "--task", "language_modeling", "--arch", arch, "--tokens-per-sample", str(row), *flags]
    parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, *size.split()])
    dictionary = tasks.language_modeling.Dictionary()
    for word in range(WORDS - len(dictionary)):
        dictionary.add_symbol(str(word))
    torch.manual_seed(1)
    symbols = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return tasks.FairseqTask.build_model(symbols, parsed).train()


def pass_over(model: nn.Module, batches: list[Tensor]) -> Callable[[], None]:
    """Forward and backward passes over all batches."""

    def run() -> None:
        for batch in batches:
            logits = model(batch)[0]
            F.cross_entropy(logits.flatten(0, 1), batch.flatten(), ignore_index=PAD).backward()

    return run


def tokens_per_second(calls: dict[str, Callable[[], None]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of processor time of each call in each round; calls take turns, after a round to warm up."""
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    for i in tqdm(range(rounds + 1), desc="rounds", unit="", leave=False, disable=None):
        for name, call in calls.items():
            started = time.process_time()
            call()
            if i:
                speeds[name].append(tokens / (time.process_time() - started))
    return speeds


def functions(tokens: int, seed: int, rounds: int) -> None:
    """Print the time of attention over one row: one document, packed documents, and gates of -inf between them."""
    lengths = torch.tensor(lengths_of(tokens, seed))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
    first = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    gates = torch.zeros(1, HEADS, tokens).masked_fill(first[:, None], -math.inf)
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH // HEADS).transpose(1, 2).requires_grad_() for _ in range(3))
    kinds = {"one document": {}, "packed": {"segment_ids": ids}, "gates": {"log_decay": gates}}
    calls = {
        f"{op.__name__}, {name}": lambda op=op, kind=kind: op(q, k, v, causal=True, **kind).sum().backward()
        for op in (linear_attention, flow_attention)
        for name, kind in kinds.items()
        if op is linear_attention or name != "gates"  # Flow-Attention accepts only finite gates
    }
    print(f"{len(lengths)} documents, {tokens} tokens: milliseconds")
    for name, speeds in tokens_per_second(calls, tokens, rounds).items():
        print(f"{name}: {1000 * tokens / statistics.median(speeds):.0f}")


@script("packed_documents")
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = CommandParser(description=__doc__.splitlines()[0])
    default = "flowformer,linear,gla,flash,softmax"
    parser.add_argument("--arch", type=architectures_of("_lm"), default=default, help="architectures, without _lm")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of all documents together")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; their median is printed")
    parser.add_argument("--seed", type=int, default=1, help="of the documents")
    parser.add_argument("--functions", action="store_true", help="functions by themselves, in one row of --tokens")
    chosen = parser.parse_args(arguments)
    if min(chosen.tokens, chosen.row, chosen.rounds) < 1 or chosen.tokens % chosen.row:
        parser.error(f"--tokens is {chosen.tokens} and --row {chosen.row}; allowed: full rows, and --rounds from 1")
    torch.set_num_threads(1)
    if chosen.functions:
        functions(chosen.tokens, chosen.seed, chosen.rounds)
        return 0
    documents = documents_of(chosen.tokens, chosen.seed)
    packed = packed_rows(documents, chosen.row)
    padded = padded_rows(documents, chosen.tokens)
    by_length = padded_rows(sorted(documents, key=len), chosen.tokens)
    sizes = [sum(batch.numel() for batch in batches) for batches in (padded, by_length)]
    print(f"{len(documents)} documents, {chosen.tokens} tokens; with padding {sizes[0]}, sorted by length {sizes[1]}\n")
    print("| model | packed, apart | padded | padded, sorted by length | packed, not apart |")
    print("| --- | --- | --- | --- | --- |")
    for arch in chosen.arch:
        name = f"{arch}_lm"
        apart, together = build(name, chosen.row, "--lineartime-reset-at-eos"), build(name, chosen.row)
        calls = {
            "packed": pass_over(apart, packed),
            "padded": pass_over(together, padded),
            "by length": pass_over(together, by_length),
            "leaking": pass_over(together, packed),
        }
        speeds = tokens_per_second(calls, chosen.tokens, chosen.rounds)
        print(f"| `{name}` | " + " | ".join(f"{statistics.median(x):,.0f}" for x in speeds.values()) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
