"""Results of training from stock softmax weights and from random ones, as tables and JSON."""

from pathlib import Path
from typing import NamedTuple

from ..shared.tables import MISSING, Run, Table, write_reports

COMMAND = "recipes.pretrained.compare"
STOCK, RANDOM = "stock weights", "random weights"


class Outcome(NamedTuple):
    """One model, trained from one start."""

    model: str
    start: str  # STOCK or RANDOM
    before: float  # loss on held-out data before the first update
    after: float  # and after the last
    top1: float | None = None  # of images, percent


class Half(NamedTuple):
    """All models of one host."""

    title: str
    unit: str  # of the losses
    source: str  # the stock model whose weights are taken
    source_loss: float  # of that model itself, on the same held-out data
    updates: int
    outcomes: list[Outcome]


def table(half: Half) -> Table:
    """Loss before and after, a row for each model and start."""
    header = ["model", "started from", "before", f"after {half.updates} updates"]
    images = any(outcome.top1 is not None for outcome in half.outcomes)
    header += ["top-1, %"] if images else []
    rows = []
    for one in half.outcomes:
        row = [one.model, one.start, f"{one.before:.3f}", f"{one.after:.3f}"]
        rows.append(row + ([MISSING if one.top1 is None else f"{one.top1:.1f}"] if images else []))
    notes = [
        f"held-out loss, {half.unit}; the stock model, {half.source}, has {half.source_loss:.3f}",
        "a starting point, not the same model: before any update the two differ",
        "one run, one seed",
    ]
    return Table(half.title, header, rows, notes)


def write(out: Path, halves: list[Half], run: Run) -> str:
    """Write results.txt, .md and .json to ``out``; returns the text."""
    blocks = [table(half) for half in halves]
    content = {
        "run": run._asdict(),
        "halves": [{**half._asdict(), "outcomes": [one._asdict() for one in half.outcomes]} for half in halves],
    }
    return write_reports(out, blocks, run, content)
