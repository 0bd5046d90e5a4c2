"""The results of a comparison of encoder-decoders: a table, JSON, and a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from ..shared.plots import STYLE, Drawn, curves_and_dots, save
from ..shared.short_conv import TAPS
from ..shared.tables import MISSING, Run, Table, spread, write_reports
from .generated import Counted
from .plan import Plan, reads_source_in_one_state
from .prepare import Data


class Result(NamedTuple):
    """One complete training, and what its model generated."""

    model: str
    seed: int
    parameters: int
    update: int  # of the checkpoint that is best on valid
    curve: list[tuple[int, float]]  # update, and accuracy of the next token, per cent of the valid split
    counted: Counted  # of the test split
    seconds_per_update: float  # in training
    peak_bytes: int  # of the training process
    generate_bytes: int  # of the generating process
    seconds: float  # of training
    command: str


def table(plan: Plan, data: Data, results: Sequence[Result], failed: dict[str, str]) -> Table:
    """A row for each model."""
    rows = []
    for name in plan.models:
        ours = [one for one in results if one.model == name]
        cells = [MISSING] * 10
        if ours:
            cells = [
                f"{ours[0].parameters:,}",
                spread([dict(one.curve)[one.update] for one in ours], 1),
                spread([one.counted.exact for one in ours], 1),
                spread([one.counted.passages for one in ours], 1),
                spread([one.counted.tokens for one in ours], 1),
                str(len(ours)),
                f"{statistics.median(one.counted.milliseconds for one in ours):,.0f}",
                f"{max(one.generate_bytes for one in ours) / 2**20:,.0f}",
                f"{1000 * statistics.median(one.seconds_per_update for one in ours):,.0f}",
                f"{max(one.peak_bytes for one in ours) / 2**20:,.0f}",
            ]
        rows.append((name, *cells))
    layout = plan.layout
    examples = ", ".join(f"{count:,} {split}" for split, count in data.examples.items())
    notes = [
        f"sources of {layout.source_tokens:,} characters, {layout.spans} marked passages of {layout.span_tokens} "
        f"each; examples: {examples}",
        "next: per cent of the characters of the valid split's targets, </s> included, the right ones before given",
        f"exact, passages, tokens: per cent of whole targets, of passages, and of characters in their places; "
        f"fairseq-generate with --beam {plan.beam} on the test split; mean ± standard deviation over seeds",
        f"{plan.updates:,} updates of {plan.batch_size} sources, {plan.layers} + {plan.layers} layers of width "
        f"{plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all; the checkpoint best on valid",
        "NAME/CROSS: attention of encoder and decoder, and attention of the decoder to the encoder; transformer is "
        "fairseq's own",
        *(
            [f"+short_conv: a causal convolution of {TAPS} taps in front of q, k and v of the decoder; ours"]
            if any("+" in name for name in plan.models)
            else []
        ),
        "milliseconds to generate one target and for an update, and the largest memory of each process, libraries "
        "included: one thread of this machine, with whatever else it did",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
        *(f"failed: {name}: {reason}" for name, reason in failed.items()),
    ]
    header = (
        "model",
        "parameters",
        "next",
        "exact",
        "passages",
        "tokens",
        "seeds",
        "ms/target",
        "MiB generating",
        "ms/update",
        "MiB training",
    )
    return Table("Long copy with one budget", header, rows, notes)


def write(out: Path, plan: Plan, data: Data, results: Sequence[Result], failed: dict[str, str], run: Run) -> str:
    """Write results.txt, .md, .json and .png to ``out``; returns the text."""
    blocks = [table(plan, data, results, failed)]
    content = {
        "run": run._asdict(),
        "plan": {**plan._asdict(), "layout": plan.layout._asdict()},
        "examples": data.examples,
        "results": [{**one._asdict(), "counted": one.counted._asdict()} for one in results],
        "failed": failed,
    }
    plain = write_reports(out, blocks, run, content)
    if results:
        draw(plan, results, out / "results.png")
    return plain


def draw(plan: Plan, results: Sequence[Result], path: Path) -> None:
    """Mean accuracy of the next token by update, and accuracy of what was generated against its time."""
    drawn = [
        Drawn(
            name,
            [one.curve for one in ours],
            statistics.median(one.counted.milliseconds for one in ours),
            [one.counted.tokens for one in ours],
            reads_source_in_one_state(name),
        )
        for name in plan.models
        if (ours := [one for one in results if one.model == name])
    ]
    with plt.rc_context(STYLE):
        figure, curves, dots = curves_and_dots(drawn)
        curves.set(xlabel="update", ylabel="next token right, % of the valid split", ylim=(0, 101))
        curves.set_title("The right token so far is given; mean over seeds")
        dots.set(
            xlabel="ms to generate a target, one thread", ylabel="tokens right, % of the test split", ylim=(0, 105)
        )
        dots.set_title("Generated; filled: the source is kept in a state of constant size")
        save(figure, path, dpi=130)
