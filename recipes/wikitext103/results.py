"""The results of a comparison of language models: a table, JSON, and a picture."""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from ..shared.comparison import MINUTES, MODEL, PARAMETERS, PEAK, SEEDS, Column, Compared, Report, by_model, table
from ..shared.plots import STYLE, Drawn, curves_and_dots, save
from ..shared.tables import spread
from .plan import Plan, state_is_constant


class Result(NamedTuple):
    """One complete training."""

    model: str
    seed: int
    parameters: int
    perplexity: float  # of the test text, of the checkpoint that is best on valid
    update: int  # of that checkpoint
    curve: list[tuple[int, float]]  # update and perplexity of the valid text
    tokens_per_second: float  # in training, median
    peak_bytes: int  # of the training process
    seconds: float
    command: str


COLUMNS = (
    MODEL,
    PARAMETERS,
    Column("perplexity", lambda ours: spread([one.perplexity for one in ours])),
    SEEDS,
    Column("tokens/s", lambda ours: f"{statistics.median(one.tokens_per_second for one in ours):,.0f}"),
    PEAK,
    Column("decoding state", known=lambda name: "constant" if state_is_constant(name) else "grows"),
    MINUTES,
)


def report(plan: Plan, tokens: dict[str, int], unit: str, compared: Compared) -> Report:
    """A table with a row for each model, and a picture. ``unit`` is what a token is."""
    results = compared.outcomes
    content = {
        "plan": plan.as_dict(),
        "tokens": tokens,
        "unit": unit,
        "results": [one._asdict() for one in results],
        "failed": compared.failed,
    }
    tables = [table("Language models with one budget", COLUMNS, plan.models, compared, _notes(plan, tokens, unit))]
    return Report(tables, content, functools.partial(draw, plan, results) if results else None)


def _notes(plan: Plan, tokens: dict[str, int], unit: str) -> list[str]:
    splits = ", ".join(f"{count:,} {split}" for split, count in tokens.items())
    return [
        f"perplexity of the test text ({unit}), mean ± standard deviation over seeds, of the checkpoint that is best"
        f" on the valid text; tokens: {splits}",
        f"{plan.updates:,} updates of {plan.batch_tokens:,} tokens in sequences of {plan.tokens_per_sample:,}, "
        f"{plan.layers} layers of width {plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all",
        f"windows and chunks, where a model has them, are {max(1, plan.tokens_per_sample // 4)} tokens",
        *plan.notes(),
        "tokens per second in training, and the largest memory of the process, libraries included: of fairseq-train on"
        " one thread of this machine, with whatever else it did",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
    ]


def draw(plan: Plan, results: Sequence[Result], path: Path) -> None:
    """Mean perplexity of the valid text by update, and that of the test text against speed."""
    drawn = [
        Drawn(
            name,
            [one.curve for one in ours],
            statistics.median(one.tokens_per_second for one in ours),
            [one.perplexity for one in ours],
            state_is_constant(name),
        )
        for name, ours in by_model(results, plan.models).items()
    ]
    with plt.rc_context(STYLE):
        figure, curves, dots = curves_and_dots(drawn)
        curves.set(xlabel="update", ylabel="perplexity, valid text", yscale="log")
        curves.set_title("Mean over seeds")
        for set_formatter in (curves.yaxis.set_major_formatter, curves.yaxis.set_minor_formatter):
            set_formatter("{x:g}")
        dots.set(xlabel="training tokens per second, one thread", ylabel="perplexity, test text")
        dots.set_title("Mean and deviation over seeds; filled: constant decoding state")
        save(figure, path, dpi=130)
