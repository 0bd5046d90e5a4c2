"""The results of a comparison of language models: a table, JSON, and a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from ..shared.plots import STYLE, Drawn, curves_and_dots, save
from ..shared.short_conv import TAPS
from ..shared.tables import MISSING, Run, Table, spread, write_reports
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


def table(plan: Plan, tokens: dict[str, int], unit: str, results: Sequence[Result], failed: dict[str, str]) -> Table:
    """A row for each model."""
    rows = []
    for name in plan.models:
        ours = [one for one in results if one.model == name]
        rows.append(
            (
                name,
                f"{ours[0].parameters:,}" if ours else MISSING,
                spread([one.perplexity for one in ours]),
                str(len(ours)),
                f"{statistics.median(one.tokens_per_second for one in ours):,.0f}" if ours else MISSING,
                f"{max(one.peak_bytes for one in ours) / 2**20:,.0f}" if ours else MISSING,
                "constant" if state_is_constant(name) else "grows",
                f"{statistics.median(one.seconds for one in ours) / 60:.1f}" if ours else MISSING,
            )
        )
    splits = ", ".join(f"{count:,} {split}" for split, count in tokens.items())
    notes = [
        f"perplexity of the test text ({unit}), mean ± standard deviation over seeds, of the checkpoint that is best"
        f" on the valid text; tokens: {splits}",
        f"{plan.updates:,} updates of {plan.batch_tokens:,} tokens in sequences of {plan.tokens_per_sample:,}, "
        f"{plan.layers} layers of width {plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all",
        f"windows and chunks, where a model has them, are {max(1, plan.tokens_per_sample // 4)} tokens",
        f"+short_conv: a causal convolution of {TAPS} taps in front of q, k and v; ours, in none of the papers",
        "tokens per second in training, and the largest memory of the process, libraries included: of fairseq-train on"
        " one thread of this machine, with whatever else it did",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
        *(f"not trained: {name}: {reason}" for name, reason in failed.items()),
    ]
    header = ("model", "parameters", "perplexity", "seeds", "tokens/s", "MiB", "decoding state", "minutes each")
    return Table("Language models with one budget", header, rows, notes)


def write(
    out: Path,
    plan: Plan,
    tokens: dict[str, int],
    unit: str,
    results: Sequence[Result],
    failed: dict[str, str],
    run: Run,
) -> str:
    """Write results.txt, .md, .json and .png to ``out``; returns the text. ``unit`` is what a token is."""
    blocks = [table(plan, tokens, unit, results, failed)]
    content = {
        "run": run._asdict(),
        "plan": plan._asdict(),
        "tokens": tokens,
        "unit": unit,
        "results": [one._asdict() for one in results],
        "failed": failed,
    }
    plain = write_reports(out, blocks, run, content)
    if results:
        draw(plan, results, out / "results.png")
    return plain


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
        for name in plan.models
        if (ours := [one for one in results if one.model == name])
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
