"""Which attention recalls a token by its position: ``python -m recipes.wikitext103.recall`` from the checkout's root.

Each model reads random symbols and must predict the symbol a fixed distance back. Only the order of tokens helps, so
this shows in minutes what decides a comparison of language models on small budgets.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ..shared.comparison import MODEL, Column, Results
from ..shared.experiment import Data, Experiment, Record, mean, option
from ..shared.fairseq_models import model_options
from ..shared.language_models import LanguageModels, default_names, model_names, one_of

#: Number of different symbols; guessing is right 1 time in 16.
SYMBOLS = 16
#: Sequences that a trained model is tested on.
_TRIED = 128


@dataclass(frozen=True, kw_only=True)
class Recall(LanguageModels):
    """Options of language models, without a text, and with defaults for trainings of seconds."""

    file: Path | None = None
    characters: bool = False
    words: bool = False
    subwords: int | None = None
    limit: int | None = None
    jobs: int = 1
    quick: bool = False
    models: Sequence[str] = option(
        tuple(default_names()),
        "as for compare (%(default)s)",
        setting=False,
        nargs="+",
        type=one_of(model_names),
        metavar="NAME",
    )
    distance: int = option(1, "places back (%(default)s)")
    seeds: int = option(3, setting=False)
    updates: int = option(300)
    batch_tokens: int = option(256)
    tokens_per_sample: int = option(32)
    width: int = option(64)
    heads: int = option(2)

    def completed(self) -> "Recall":
        """Check the lengths; see ``Options``.

        Raises:
            ValueError: sequences are not longer than the distance, or longer than a batch.
        """
        if not self.distance < self.tokens_per_sample <= self.batch_tokens:
            raise ValueError(
                f"--tokens-per-sample is {self.tokens_per_sample}; allowed: more than --distance, {self.distance}, and "
                f"at most --batch-tokens, {self.batch_tokens}"
            )
        return self


def build(options: Recall, name: str, seed: int) -> nn.Module:
    """The model ``name`` for ``SYMBOLS`` symbols, as fairseq-train builds it."""
    symbols = Dictionary()
    for i in range(SYMBOLS):
        symbols.add_symbol(str(i))
    command = ["data", *map(str, options.model_arguments(name)), *options.more]
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    return tasks.FairseqTask.build_model(task, model_options(command))


def recall(options: Recall, name: str, seed: int) -> Record:
    """Train the model ``name`` to predict the symbol ``options.distance`` places back; returns its accuracy."""
    model = build(options, name, seed).train()
    optimizer = torch.optim.Adam(model.parameters(), options.lr, betas=(0.9, 0.98))
    warmup = max(1, options.updates // 10)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / options.updates))
    )
    generator = torch.Generator().manual_seed(seed)

    def answers(sequences: int) -> tuple[Tensor, Tensor]:
        """Draw sequences; returns the model's scores (tokens, symbols) and the correct symbols (tokens,)."""
        shape = (sequences, options.tokens_per_sample)
        tokens = torch.randint(Dictionary().nspecial, Dictionary().nspecial + SYMBOLS, shape, generator=generator)
        return model(tokens)[0][:, options.distance :].flatten(0, 1), tokens[:, : -options.distance].flatten()

    for _ in range(options.updates):
        loss = F.cross_entropy(*answers(options.batch_tokens // options.tokens_per_sample))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    model.eval()
    with torch.no_grad():
        scores, correct = answers(_TRIED)
    accuracy = 100.0 * (scores.argmax(-1) == correct).float().mean().item()
    return {"model": name, "seed": seed, "accuracy": accuracy}


def train(options: Recall, data: Data) -> Results:
    """Train and test every model with every seed."""
    torch.set_num_threads(1)
    pairs = [(seed, name) for seed in range(1, options.seeds + 1) for name in options.models]
    return Results([recall(options, name, seed) for seed, name in tqdm(pairs, unit=" trainings", disable=None)], {})


def notes(options: Recall, facts: Record) -> list[str]:
    """Notes below the table."""
    return [
        f"per cent of {SYMBOLS} random symbols, mean ± standard deviation over {options.seeds} seeds; guessing gives "
        f"{100 / SYMBOLS:.1f}",
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of "
        f"{options.tokens_per_sample:,}, {options.layers} layers of width {options.width}, {options.heads} heads, "
        f"highest learning rate {options.lr:g} for all",
    ]


EXPERIMENT = Experiment(
    command="recipes.wikitext103.recall",
    about=__doc__.splitlines()[0],
    options=Recall,
    title=lambda options, facts: f"The symbol {options.distance} places back",
    columns=(MODEL, Column("accuracy", mean("accuracy", 1))),
    notes=notes,
    prepare=lambda options: Data(options.out, {}),
    train=train,
    one_budget=False,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
