"""Results of the forms of a teacher, as tables and a picture: how much of the teacher's lead each wins back.

A record of a form and a seed has the number of ``parameters`` and of those that are ``learned`` in stage 1, the losses
of the ``teacher`` by name, its own ``losses`` by stage and name, the share that is ``won_back``, the losses with
``parts`` of its attentions after stage 2, and ``seconds`` and ``commands`` of its trainings by stage; for text also its
``reach``. Lower losses are better; those of text are nats per token. A teacher's record has the model ``TEACHER``, and
``losses`` by name.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from ..shared.comparison import MODEL, SEEDS, Column, Results, by_model, of_model, table
from ..shared.experiment import PARAMETERS, Experiment, Record
from ..shared.plots import STEPS, STYLE, legend_beside, save, style_of
from ..shared.tables import MISSING, Table, spread
from .parts import PARTS
from .stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED, Stages

#: The loss that is reported, also as shares of the teacher's lead.
TEST = "test"
#: The records of one model, one for each seed.
Records = Sequence[Record]
#: Stages -> their labels in the picture.
_WORDS = {
    EXCHANGED: "exchanged",
    TRANSFERRED: "after stage 1",
    DISTILLED: "after stage 2",
    SCRATCH: "from scratch,\nas long as both",
}


class Panel(NamedTuple):
    """A row of the picture, drawn for the forms without softmax layers and for those with some."""

    label: str  # of the axis
    draw: Callable[[Axes, Any, Record, dict[str, Records], Records], None]  # options, facts, forms, teachers


def no_tables(options: Any, facts: Record, records: Sequence[Record]) -> list[Table]:
    """No further tables."""
    return []


class Measure(NamedTuple):
    """How losses are shown: as which numbers, and with which columns and notes."""

    columns: dict[str, str]  # the name of a loss -> the header of its column, for the teacher
    label: str  # of the picture's axis
    of: Callable[[float], float]  # a loss -> the number shown
    whole: Callable[[Any], str]  # options -> the length of the teacher's training
    teacher_notes: Callable[[Any, Record], list[str]]  # options, facts -> notes
    notes: Callable[[Any, Record], list[str]]
    tables: Callable[[Any, Record, Sequence[Record]], list[Table]] = no_tables  # further ones
    panels: Sequence[Panel] = ()  # below the one of the stages, if records have a reach

    def cell(self, losses: Sequence[float]) -> str:
        """Mean and deviation of the numbers shown for ``losses``."""
        return spread([self.of(loss) for loss in losses])


def experiment(measure: Measure, **arguments: Any) -> Experiment:
    """The experiment whose table, notes and picture show ``measure``; ``arguments``: others of ``Experiment``."""
    return Experiment(
        title="From softmax to linear time",
        columns=_columns(measure),
        notes=measure.notes,
        extra_tables=functools.partial(_further_tables, measure),
        picture=functools.partial(_draw, measure),
        **arguments,
    )


def won_back(exchanged: float, converted: float, teacher: float) -> float | None:
    """Fraction of the gap between the exchanged model and the teacher that training closed.

    (exchanged - converted) / (exchanged - teacher), all three losses: 0 for the exchanged model, 1 for the teacher.
    None where the teacher is not ahead.
    """
    return (exchanged - converted) / (exchanged - teacher) if exchanged > teacher else None


def with_shares(record: Record) -> Record:
    """``record`` with ``won_back`` by stage and name; None where it is unknown."""
    losses, teacher = record["losses"], record["teacher"]
    exchanged = losses.get(EXCHANGED)

    def share(stage: str, name: str) -> float | None:
        return None if exchanged is None else won_back(exchanged[name], losses[stage][name], teacher[name])

    return record | {"won_back": {stage: {name: share(stage, name) for name in teacher} for stage in losses}}


def _columns(measure: Measure) -> tuple[Column, ...]:
    def loss(stage: str) -> Callable[[Records], str]:
        return lambda records: measure.cell([x["losses"][stage][TEST] for x in records if stage in x["losses"]])

    return (
        MODEL,
        Column("learn in stage 1", lambda records: f"{records[0]['learned']:,}"),
        Column("exchanged", loss(EXCHANGED)),
        Column("after stage 1", loss(TRANSFERRED)),
        Column("after stage 2", loss(DISTILLED)),
        Column("from scratch", loss(SCRATCH)),
        Column("won back by stage 1, %", _share(TRANSFERRED)),
        Column("won back, %", _share(DISTILLED)),
        Column("from scratch, %", _share(SCRATCH)),
        SEEDS,
        Column("seconds", _seconds(TRANSFERRED, DISTILLED)),
        Column("from scratch, seconds", _seconds(SCRATCH)),
    )


def _share(stage: str) -> Callable[[Records], str]:
    def cell(records: Records) -> str:
        shares = [record["won_back"][stage][TEST] for record in records if stage in record["won_back"]]
        return spread([100.0 * share for share in shares if share is not None], 1)

    return cell


def _seconds(*stages: str) -> Callable[[Records], str]:
    def cell(records: Records) -> str:
        by_stage = [record["seconds"] for record in records if record["seconds"].keys() >= {*stages}]
        return f"{statistics.median(sum(x[s] for s in stages) for x in by_stage):,.0f}" if by_stage else MISSING

    return cell


def _further_tables(measure: Measure, options: Stages, facts: Record, records: list[Record]) -> list[Table]:
    tables = [_teacher_table(measure, options, facts, records)]
    if windowed := [name for name in options.models if options.form(name).windowed]:
        tables.append(_parts_table(measure, windowed, records))
    return [*tables, *measure.tables(options, facts, records)]


def _teacher_table(measure: Measure, options: Stages, facts: Record, records: Records) -> Table:
    def number(name: str) -> Callable[[Records], str]:
        return lambda teachers: measure.cell([teacher["losses"][name] for teacher in teachers])

    columns = (
        MODEL,
        PARAMETERS,
        Column("trained for", known=lambda _: measure.whole(options)),
        *(Column(title, number(name)) for name, title in measure.columns.items()),
        SEEDS,
        Column("seconds", lambda teachers: f"{statistics.median(teacher['seconds'] for teacher in teachers):,.0f}"),
    )
    return table("The teacher", columns, [TEACHER], Results(list(records), {}), measure.teacher_notes(options, facts))


def _parts_table(measure: Measure, windowed: list[str], records: Records) -> Table:
    def part(name: str) -> Callable[[Records], str]:
        return lambda outcomes: measure.cell([x["parts"][name][TEST] for x in outcomes if name in x["parts"]])

    notes = [
        f"{measure.label}, after stage 2, of the same weights: with the whole attention; with the softmax window "
        "alone; with the linear attention alone, which then sees the tokens of the window too; with 0 in place of both",
        "layers of softmax attention, where there are some, stay as they are",
    ]
    columns = (MODEL, *(Column(name, part(name)) for name in PARTS), SEEDS)
    title = "What the parts of an attention with a window do"
    return table(title, columns, windowed, Results(list(records), {}), notes)


def _draw(measure: Measure, options: Stages, facts: Record, records: Records, path: Path) -> None:
    """Draw means over seeds: forms without softmax layers on the left, forms with some on the right."""
    mixed = {name: bool(options.form(name).softmax_layers) for name in options.models}
    sides = {
        "linear time in every layer": [name for name in mixed if not mixed[name]],
        "with layers of softmax attention": [name for name in mixed if mixed[name]],
    }
    sides = {title: side_records for title, names in sides.items() if (side_records := by_model(records, names))}
    teachers = of_model(records, TEACHER)
    panels = [Panel(measure.label, functools.partial(_draw_stages, measure))]
    panels += measure.panels if any("reach" in record for record in records) else ()
    columns = max(1, len(sides))
    with plt.rc_context(STYLE):
        size = {"figsize": (6.5 * columns, 4.8 * len(panels)), "layout": "constrained"}
        figure, grid = plt.subplots(len(panels), columns, sharey="row", squeeze=False, **size)
        for place, (row, panel) in enumerate(zip(grid, panels)):
            for axes, (title, side_records) in zip(row, sides.items()):
                panel.draw(axes, options, facts, side_records, teachers)
                if place == 0:
                    axes.set_title(title)
            row[0].set_ylabel(panel.label)
        save(figure, path, dpi=130)


def _draw_stages(
    measure: Measure, axes: Axes, options: Stages, facts: Record, forms: dict[str, Records], teachers: Records
) -> None:
    if teachers:
        mean = statistics.mean(measure.of(teacher["losses"][TEST]) for teacher in teachers)
        axes.axhline(mean, color="0.5", linestyle="--", label="teacher")
    for i, (name, records) in enumerate(forms.items()):
        points = {}
        for position, stage in enumerate(_WORDS):
            if values := [measure.of(x["losses"][stage][TEST]) for x in records if stage in x["losses"]]:
                points[position] = statistics.mean(values)
        style = style_of(i)
        scratch = points.pop(len(_WORDS) - 1, None)
        axes.plot(list(points), list(points.values()), marker=style.marker, label=name, **style.line)
        if scratch is not None:
            axes.plot(len(_WORDS) - 1, scratch, marker=style.marker, color=style.colour)
    words = list(_WORDS.values())[: len(_WORDS) - options.no_scratch]
    axes.set_xticks(range(len(words)), words)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=STEPS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both", axis="y")
    legend_beside(axes)
