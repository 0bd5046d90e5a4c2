"""The results of a comparison of encoder-decoders: a table, JSON, and a picture."""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from ..shared.additions import addition_notes
from ..shared.comparison import MODEL, PARAMETERS, PEAK, SEEDS, Column, Compared, Report, by_model, table
from ..shared.plots import STYLE, Drawn, curves_and_dots, save
from ..shared.tables import spread
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


COLUMNS = (
    MODEL,
    PARAMETERS,
    Column("next", lambda ours: spread([dict(one.curve)[one.update] for one in ours], 1)),
    Column("exact", lambda ours: spread([one.counted.exact for one in ours], 1)),
    Column("passages", lambda ours: spread([one.counted.passages for one in ours], 1)),
    Column("tokens", lambda ours: spread([one.counted.tokens for one in ours], 1)),
    SEEDS,
    Column("ms/target", lambda ours: f"{statistics.median(one.counted.milliseconds for one in ours):,.0f}"),
    Column("MiB generating", lambda ours: f"{max(one.generate_bytes for one in ours) / 2**20:,.0f}"),
    Column("ms/update", lambda ours: f"{1000 * statistics.median(one.seconds_per_update for one in ours):,.0f}"),
    PEAK._replace(header="MiB training"),
)


def report(plan: Plan, data: Data, compared: Compared) -> Report:
    """A table with a row for each model, and a picture."""
    results = compared.outcomes
    content = {
        "plan": {**plan.as_dict(), "layout": plan.layout._asdict()},
        "examples": data.examples,
        "results": [{**one._asdict(), "counted": one.counted._asdict()} for one in results],
        "failed": compared.failed,
    }
    tables = [table("Long copy with one budget", COLUMNS, plan.models, compared, _notes(plan, data), "failed")]
    return Report(tables, content, functools.partial(draw, plan, results) if results else None)


def _notes(plan: Plan, data: Data) -> list[str]:
    layout = plan.layout
    examples = ", ".join(f"{count:,} {split}" for split, count in data.examples.items())
    return [
        f"sources of {layout.source_tokens:,} characters, {layout.spans} marked passages of {layout.span_tokens} "
        f"each; examples: {examples}",
        "next: per cent of the characters of the valid split's targets, </s> included, the right ones before given",
        f"exact, passages, tokens: per cent of whole targets, of passages, and of characters in their places; "
        f"fairseq-generate with --beam {plan.beam} on the test split; mean ± standard deviation over seeds",
        f"{plan.updates:,} updates of {plan.batch_size} sources, {plan.layers} + {plan.layers} layers of width "
        f"{plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all; the checkpoint best on valid",
        "NAME/CROSS: attention of encoder and decoder, and attention of the decoder to the encoder; transformer is "
        "fairseq's own",
        *addition_notes(plan.models),
        "milliseconds to generate one target and for an update, and the largest memory of each process, libraries "
        "included: one thread of this machine, with whatever else it did",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
    ]


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
        for name, ours in by_model(results, plan.models).items()
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
