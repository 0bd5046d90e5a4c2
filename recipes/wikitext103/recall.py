"""Which attention recalls a token by its position: ``python -m recipes.wikitext103.recall``.

Each model reads random symbols and must predict the symbol a fixed distance back. Only the order of tokens helps, so
this shows in minutes what decides a comparison of language models on small budgets.
"""

import argparse
import itertools
import math
import shlex
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from .. import models, runs

#: Number of different symbols; guessing is right 1 time in 16.
SYMBOLS = 16
#: Sequences that a trained model is tested on.
_TRIED = 128


def recall(options: argparse.Namespace, name: str, seed: int) -> float:
    """Train a model to predict the symbol ``options.distance`` places back; returns its accuracy in per cent."""
    dictionary = models.dictionary_of(SYMBOLS + 4)
    torch.manual_seed(seed)
    model = models.build([*models.model_arguments(options, name), *shlex.split(options.more)], dictionary).train()
    optimizer = torch.optim.Adam(model.parameters(), options.lr, betas=(0.9, 0.98))
    warmup = max(1, options.updates // 10)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / options.updates))
    )
    generator = torch.Generator().manual_seed(seed)

    def answers(sequences: int) -> tuple[Tensor, Tensor]:
        """Draw sequences; returns the model's scores (tokens, symbols) and the correct symbols (tokens,)."""
        shape = (sequences, options.tokens_per_sample)
        tokens = torch.randint(dictionary.nspecial, len(dictionary), shape, generator=generator)
        return model(tokens)[0][:, options.distance :].flatten(0, 1), tokens[:, : -options.distance].flatten()

    for _ in range(options.updates):
        loss = F.cross_entropy(*answers(options.batch_tokens // options.tokens_per_sample))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    model.eval()
    with torch.no_grad():
        scores, correct = answers(_TRIED)
    return 100.0 * (scores.argmax(-1) == correct).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, test and print."""
    sizes = {"updates": 300, "batch_tokens": 256, "tokens_per_sample": 32, "width": 64, "heads": 2}
    parser = models.parser(__doc__.splitlines()[0], "work/wikitext103/recall", models.default_names(), **sizes)
    parser.add_argument("--distance", type=int, default=1, help="places back")
    options = models.parsed(parser, arguments, models.all_names())
    if not options.distance < options.tokens_per_sample:
        parser.error(f"--tokens-per-sample is {options.tokens_per_sample}; allowed: more than --distance")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    trained = itertools.product(range(1, options.seeds + 1), options.models)
    rows = [{"model": name, "seed": seed, "accuracy": recall(options, name, seed)} for seed, name in tqdm([*trained])]
    found = pd.DataFrame(rows)
    notes = [
        f"per cent of {SYMBOLS} random symbols, mean ± standard deviation over {options.seeds} seeds; guessing gives "
        f"{100 / SYMBOLS:.1f}",
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of {options.tokens_per_sample}, "
        f"{options.layers} layers of width {options.width}, {options.heads} heads, highest rate {options.lr:g} for all",
    ]
    shown = runs.table(found, {"accuracy": ("accuracy", runs.spread(1))})
    runs.report(options.out, {f"The symbol {options.distance} places back": shown}, notes, found)


if __name__ == "__main__":
    main()
