"""The measurements of a comparison, as tables, JSON and a picture, with notes on those that failed."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

from ..shared.comparison import Column, Compared, Report, by_length, of_model, table
from ..shared.plots import COLOURS, DASHES, STYLE, logarithmic, save
from ..shared.tables import Table, break_even
from .models import MODELS
from .subword_text import SplitCounts

FUSED = "transformer_pp_lm"


class Measurement(NamedTuple):
    """One model trained and evaluated at one length."""

    architecture: str
    length: int
    parameters: int
    perplexity: float  # of the valid split after the last update
    tokens_per_second: float  # median of fairseq's log
    peak_bytes: int  # of the whole fairseq-train process
    train_seconds: float
    command: str


class Plan(NamedTuple):
    """The lengths, updates and batch of every model."""

    architectures: list[str]
    lengths: list[int]
    updates: int
    tokens_per_update: int
    vocabulary: int


class Comparison(NamedTuple):
    """All measurements so far, and the failures."""

    plan: Plan
    text: dict[str, SplitCounts]
    measured: list[Measurement]
    failed: dict[tuple[str, int], str]  # architecture and length -> the last line of the reason


def missing(comparison: Comparison) -> list[tuple[str, int]]:
    """Architectures and lengths of the plan that are not measured."""
    done = {(one.architecture, one.length) for one in comparison.measured}
    return [
        (architecture, length)
        for length in comparison.plan.lengths
        for architecture in comparison.plan.architectures
        if (architecture, length) not in done
    ]


def tables(comparison: Comparison) -> list[Table]:
    """One table each of perplexity, seconds and memory: a row for each model, a column for each length."""
    return [_perplexity(comparison), _seconds(comparison), _memory(comparison)]


TITLE = Column("model", known=lambda name: MODELS[name].title)
ATTENTION = Column("attention", known=lambda name: MODELS[name].attention)


def _table(comparison: Comparison, title: str, columns: list[Column], notes: list[str]) -> Table:
    return table(title, columns, comparison.plan.architectures, Compared(comparison.measured, {}), notes)


def _perplexity(comparison: Comparison) -> Table:
    plan, valid = comparison.plan, comparison.text["valid"]
    columns = [TITLE, Column("architecture", known=str), Column("parameters", _parameters)]
    columns += by_length(plan.lengths, lambda one: f"{one.perplexity:.2f}")
    notes = [
        f"of the valid split, {valid.tokens:,} subwords of a vocabulary of {plan.vocabulary:,}; to the power of"
        f" {valid.tokens_per_word:.4f} it is perplexity per word",
        f"after {plan.updates} updates of {plan.tokens_per_update:,} tokens each; one run, one seed",
    ]
    return _table(comparison, "Perplexity by sequence length", columns, notes)


def _seconds(comparison: Comparison) -> Table:
    per_update = comparison.plan.tokens_per_update
    columns = by_length(comparison.plan.lengths, lambda one: f"{per_update / one.tokens_per_second:.3f}")
    notes = [f"{per_update:,} over the median of the tokens per second in fairseq's log"]
    title = f"Seconds per training step of {per_update:,} tokens"
    return _table(comparison, title, [TITLE, ATTENTION, *columns], [*notes, *_break_even_notes(comparison)])


def _memory(comparison: Comparison) -> Table:
    columns = by_length(comparison.plan.lengths, lambda one: f"{one.peak_bytes / 2**20:,.0f}")
    notes = ["the whole process, Python and torch included", *_not_measured(comparison)]
    return _table(comparison, "Peak memory of fairseq-train, MiB", [TITLE, ATTENTION, *columns], notes)


def _parameters(measured: Sequence[Measurement]) -> str:
    counts = sorted({one.parameters for one in measured})
    return " to ".join(f"{count:,}" for count in counts[:: max(1, len(counts) - 1)])


def _break_even_notes(comparison: Comparison) -> list[str]:
    speeds: dict[str, dict[int, float]] = {}
    for one in comparison.measured:
        speeds.setdefault(one.architecture, {})[one.length] = one.tokens_per_second
    if FUSED not in speeds:
        return []
    notes = []
    for architecture in speeds:
        if architecture != FUSED:
            length = break_even(speeds, architecture, FUSED)
            said = f"at least as fast from {length:,} tokens on" if length else "slower at the longest length"
            notes.append(f"{MODELS[architecture].title} against {MODELS[FUSED].title}: {said}")
    return notes


def _not_measured(comparison: Comparison) -> list[str]:
    return [
        f"not measured: {architecture} at {length:,}" + (f": {reason}" if reason else "")
        for architecture, length in missing(comparison)
        for reason in [comparison.failed.get((architecture, length))]
    ]


def report(comparison: Comparison) -> Report:
    """All tables, and a picture."""
    content = {
        "plan": comparison.plan._asdict(),
        "text": {split: counts._asdict() for split, counts in comparison.text.items()},
        "measured": [one._asdict() for one in comparison.measured],
        "not_measured": [
            {"architecture": architecture, "length": length, "reason": comparison.failed.get((architecture, length))}
            for architecture, length in missing(comparison)
        ],
    }
    picture = functools.partial(draw, comparison) if comparison.measured else None
    return Report(tables(comparison), content, picture, "speed.png")


def draw(comparison: Comparison, path: Path) -> None:
    """Draw seconds per step against length, both axes logarithmic: a straight line is a power of the length."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
        for architecture, colour, dash in zip(comparison.plan.architectures, COLOURS, DASHES):
            points = sorted(
                (one.length, comparison.plan.tokens_per_update / one.tokens_per_second)
                for one in of_model(comparison.measured, architecture)
            )
            if points:
                axes.plot(*zip(*points), linestyle=dash, marker="o", color=colour, label=MODELS[architecture].title)
        axes.set(xlabel="tokens in a sequence", ylabel="seconds per training step")
        axes.set_title(f"{comparison.plan.tokens_per_update:,} tokens per step")
        logarithmic(axes, comparison.plan.lengths)
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False)
        save(figure, path, dpi=130)
