"""Which attention finds a token again by its place: ``python -m recipes.wikitext103.recall`` from the checkout's root.

Each model of the comparison reads random symbols and is to name the one so many places back. Nothing but order helps,
so this shows in minutes what decides a comparison of language models on small budgets.
"""

import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared import comparison
from ..shared.commands import shown_path
from ..shared.comparison import MODEL, Column, Compared
from ..shared.fairseq_models import model_options
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.tables import Table, describe_run, spread, write_reports
from ..shared.working_folder import working_folder
from .compare import model
from .plan import Plan, default_names

COMMAND = "recipes.wikitext103.recall"
#: Random symbols, of which one is right: guessing is right in 1 of 16.
SYMBOLS = 16
#: Sequences that a trained model is tried on.
_TRIED = 128


class Recall(NamedTuple):
    """One trained model."""

    model: str
    seed: int
    accuracy: float  # per cent


def build(plan: Plan, name: str, seed: int) -> nn.Module:
    """The model ``name`` for ``SYMBOLS`` symbols, as fairseq-train builds it."""
    symbols = Dictionary()
    for i in range(SYMBOLS):
        symbols.add_symbol(str(i))
    command = ["data", *map(str, plan.model_arguments(name)), *plan.more]
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    return tasks.FairseqTask.build_model(task, model_options(command))


def recall(plan: Plan, name: str, seed: int, distance: int) -> Recall:
    """Train the model ``name`` to name the symbol ``distance`` places back, and try it."""
    model = build(plan, name, seed).train()
    optimizer = torch.optim.Adam(model.parameters(), plan.lr, betas=(0.9, 0.98))
    warmup = max(1, plan.updates // 10)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / plan.updates))
    )
    generator = torch.Generator().manual_seed(seed)

    def answers(sequences: int) -> tuple[Tensor, Tensor]:
        """Scores of all symbols (tokens, symbols), and the symbols that are right."""
        shape = (sequences, plan.tokens_per_sample)
        tokens = torch.randint(Dictionary().nspecial, Dictionary().nspecial + SYMBOLS, shape, generator=generator)
        return model(tokens)[0][:, distance:].flatten(0, 1), tokens[:, :-distance].flatten()

    for _ in range(plan.updates):
        loss = F.cross_entropy(*answers(plan.batch_tokens // plan.tokens_per_sample))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    model.eval()
    with torch.no_grad():
        scores, right = answers(_TRIED)
    return Recall(name, seed, 100.0 * (scores.argmax(-1) == right).float().mean().item())


def table(plan: Plan, distance: int, found: list[Recall]) -> Table:
    """A row for each model."""
    accuracy = Column("accuracy", lambda ours: spread([one.accuracy for one in ours], 1))
    notes = [
        f"per cent of {SYMBOLS} random symbols, mean ± standard deviation over {plan.seeds} seeds; guessing gives "
        f"{100 / SYMBOLS:.1f}",
        f"{plan.updates:,} updates of {plan.batch_tokens:,} tokens in sequences of {plan.tokens_per_sample:,}, "
        f"{plan.layers} layers of width {plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
    ]
    title = f"The symbol {distance} places back"
    return comparison.table(title, [MODEL, accuracy], plan.models, Compared(found, {}), notes)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.wikitext103.recall", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", type=model, default=default_names(), metavar="NAME", help="as for compare (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("work/wikitext103/recall"), help="default: %(default)s")
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, help="highest learning rate, of all models (%(default)s)"
    )
    parser.add_argument("--distance", type=positive_int, default=1, help="places back (%(default)s)")
    sizes = {"seeds": 3, "updates": 300, "batch-tokens": 256, "tokens-per-sample": 32}
    for name, default in {**sizes, "width": 64, "layers": 2, "heads": 2}.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    parser.add_argument("--more", default="", metavar="ARGUMENTS", help="of fairseq-train, as for compare")
    return parser


@script("recall")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    chosen = parser().parse_args(arguments)
    started, command = time.monotonic(), command_line(COMMAND, arguments)
    if not chosen.distance < chosen.tokens_per_sample <= chosen.batch_tokens:
        raise ValueError(
            f"--tokens-per-sample is {chosen.tokens_per_sample}; allowed: more than --distance, {chosen.distance}, and "
            f"at most --batch-tokens, {chosen.batch_tokens}"
        )
    plan = Plan.chosen(chosen, evaluations=1, more=shlex.split(chosen.more))
    torch.set_num_threads(1)
    out = chosen.out.absolute()
    with working_folder(out, COMMAND):
        plain = _measure(plan, chosen.distance, out, started, command)
    print("\n" + plain)
    print(f"\nThe same as Markdown and JSON: {shown_path(out)}")
    return 0


def _measure(plan: Plan, distance: int, out: Path, started: float, command: str) -> str:
    """Train and try every model, and write the results to ``out``; returns their table."""
    pairs = [(seed, name) for seed in range(1, plan.seeds + 1) for name in plan.models]
    found = [recall(plan, name, seed, distance) for seed, name in tqdm(pairs, unit=" trainings", disable=None)]
    blocks, run = [table(plan, distance, found)], describe_run(command, time.monotonic() - started)
    content = {"run": run._asdict(), "plan": plan.as_dict(), "results": [one._asdict() for one in found]}
    return write_reports(out, blocks, run, {**content, "distance": distance})


if __name__ == "__main__":
    sys.exit(main())
