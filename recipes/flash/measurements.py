"""The measurements of a comparison, as tables, JSON and a picture, with notes on those that failed."""

from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..shared.plots import COLOURS, DASHES, STYLE, save
from ..shared.tables import MISSING, Run, Table, break_even, write_reports
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
    plan, valid = comparison.plan, comparison.text["valid"]
    by = {(one.architecture, one.length): one for one in comparison.measured}

    def rows(cell) -> list[tuple[str, ...]]:
        return [
            (
                *MODELS[architecture],
                *(cell(by[architecture, n]) if (architecture, n) in by else MISSING for n in plan.lengths),
            )
            for architecture in plan.architectures
        ]

    header = ("model", "attention", *(f"{length:,}" for length in plan.lengths))
    perplexity = Table(
        "Perplexity by sequence length",
        ("model", "architecture", "parameters", *header[2:]),
        [
            (row[0], architecture, _parameters(comparison, architecture), *row[2:])
            for architecture, row in zip(plan.architectures, rows(lambda one: f"{one.perplexity:.2f}"), strict=True)
        ],
        [
            f"of the valid split, {valid.tokens:,} subwords of a vocabulary of {plan.vocabulary:,}; to the power of"
            f" {valid.tokens_per_word:.4f} it is perplexity per word",
            f"after {plan.updates} updates of {plan.tokens_per_update:,} tokens each; one run, one seed",
        ],
    )
    per_update = plan.tokens_per_update
    seconds = Table(
        f"Seconds per training step of {per_update:,} tokens",
        header,
        rows(lambda one: f"{per_update / one.tokens_per_second:.3f}"),
        [f"{per_update:,} over the median of the tokens per second in fairseq's log", *_break_even_notes(comparison)],
    )
    memory = Table(
        "Peak memory of fairseq-train, MiB",
        header,
        rows(lambda one: f"{one.peak_bytes / 2**20:,.0f}"),
        ["the whole process, Python and torch included", *_not_measured(comparison)],
    )
    return [perplexity, seconds, memory]


def _parameters(comparison: Comparison, architecture: str) -> str:
    counts = sorted({one.parameters for one in comparison.measured if one.architecture == architecture})
    return " to ".join(f"{count:,}" for count in counts[:: max(1, len(counts) - 1)]) or MISSING


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
            notes.append(f"{MODELS[architecture][0]} against {MODELS[FUSED][0]}: {said}")
    return notes


def _not_measured(comparison: Comparison) -> list[str]:
    return [
        f"not measured: {architecture} at {length:,}" + (f": {reason}" if reason else "")
        for architecture, length in missing(comparison)
        for reason in [comparison.failed.get((architecture, length))]
    ]


def write(out: Path, comparison: Comparison, run: Run) -> str:
    """Write results.txt, .md and .json and speed.png to ``out``; returns the text."""
    blocks = tables(comparison)
    content = {
        "run": run._asdict(),
        "plan": comparison.plan._asdict(),
        "text": {split: counts._asdict() for split, counts in comparison.text.items()},
        "measured": [one._asdict() for one in comparison.measured],
        "not_measured": [
            {"architecture": architecture, "length": length, "reason": comparison.failed.get((architecture, length))}
            for architecture, length in missing(comparison)
        ],
    }
    plain = write_reports(out, blocks, run, content)
    if comparison.measured:
        draw(comparison, out / "speed.png")
    return plain


def draw(comparison: Comparison, path: Path) -> None:
    """Draw seconds per step against length, both axes logarithmic: a straight line is a power of the length."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
        for architecture, colour, dash in zip(comparison.plan.architectures, COLOURS, DASHES):
            points = sorted(
                (one.length, comparison.plan.tokens_per_update / one.tokens_per_second)
                for one in comparison.measured
                if one.architecture == architecture
            )
            if points:
                axes.plot(*zip(*points), linestyle=dash, marker="o", color=colour, label=MODELS[architecture][0])
        axes.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="seconds per training step")
        axes.set_title(f"{comparison.plan.tokens_per_update:,} tokens per step")
        axes.set_xticks(comparison.plan.lengths)
        axes.xaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False)
        save(figure, path, dpi=130)
