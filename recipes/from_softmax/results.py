"""The results of a comparison of conversions: how much of the teacher's lead is won back, tables and a picture."""

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..shared.comparison import MODEL, SEEDS, Column, Compared, Report, by_model, table
from ..shared.plots import STYLE, legend_beside, look, save
from ..shared.tables import MISSING, Table, spread
from .forms import Form
from .parts import PARTS
from .plan import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED

#: The number that is reported, and of which shares are.
TEST = "test"


class Ran(NamedTuple):
    """A complete training, of a teacher or in a stage of a form."""

    model: str
    seed: int
    stage: str
    folder: Path
    losses: dict[str, float]  # see ``Outcome``
    parameters: int
    seconds: float
    command: str


class Outcome(NamedTuple):
    """Results of one form of the teacher of a seed: its losses after each stage that was run, and from scratch.

    Losses are by name, and lower is better. Those of text are nats per token, by split.
    """

    model: str
    seed: int
    parameters: int
    learned: int  # of these, in stage 1
    teacher: dict[str, float]
    losses: dict[str, dict[str, float]]  # by stage
    parts: dict[str, dict[str, float]]  # after stage 2, with a part of each attention alone, by part
    seconds: dict[str, float]  # of the trainings, by stage
    commands: dict[str, str]

    def share(self, stage: str, name: str = TEST) -> float | None:
        """``won_back`` of a stage; None where it is not known."""
        if not {EXCHANGED, stage} <= self.losses.keys():
            return None
        return won_back(self.losses[EXCHANGED][name], self.losses[stage][name], self.teacher[name])


def won_back(exchanged: float, converted: float, teacher: float) -> float | None:
    """Fraction of the gap between the exchanged model and the teacher that training closed.

    (exchanged - converted) / (exchanged - teacher), all three losses: 0 for the exchanged model, 1 for the teacher.
    None where the teacher is not ahead.
    """
    return (exchanged - converted) / (exchanged - teacher) if exchanged > teacher else None


class Shown(NamedTuple):
    """How a comparison is shown."""

    title: str
    form: Callable[[str], Form]  # by name
    numbers: dict[str, str]  # what is known of the teacher, by the name of the loss; its column
    label: str  # of what is drawn
    of: Callable[[float], float]  # what is shown of a loss
    digits: int
    logarithmic: bool
    length: str  # of the teacher's training
    teacher_notes: list[str]
    notes: list[str]

    def cell(self, losses: Sequence[float]) -> str:
        """Mean and deviation of what is shown."""
        return spread([self.of(loss) for loss in losses], self.digits)


def columns(shown: Shown) -> tuple[Column, ...]:
    """The columns of the table of all forms."""

    def loss(stage: str) -> Callable[[Sequence[Outcome]], str]:
        return lambda ours: shown.cell([one.losses[stage][TEST] for one in ours if stage in one.losses])

    return (
        MODEL,
        Column("learn in stage 1", lambda ours: f"{ours[0].learned:,}"),
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


def _share(stage: str) -> Callable[[Sequence[Outcome]], str]:
    def cell(ours: Sequence[Outcome]) -> str:
        shares = [one.share(stage) for one in ours]
        return spread([100.0 * one for one in shares if one is not None], 1)

    return cell


def _seconds(*stages: str) -> Callable[[Sequence[Outcome]], str]:
    def cell(ours: Sequence[Outcome]) -> str:
        whole = [sum(one.seconds[stage] for stage in stages) for one in ours if one.seconds.keys() >= {*stages}]
        return f"{statistics.median(whole):,.0f}" if whole else MISSING

    return cell


def report(
    models: Sequence[str], shown: Shown, content: dict[str, Any], teachers: Sequence[Ran], compared: Compared
) -> Report:
    """The tables and a picture; ``content`` is what results.json has besides."""
    outcomes = compared.outcomes
    content = {
        **content,
        "teachers": [{**one._asdict(), "folder": one.folder.name} for one in teachers],
        "results": [{**one._asdict(), "won_back": _shares(one)} for one in outcomes],
        "failed": compared.failed,
    }
    tables = [
        _teacher_table(shown, Compared(list(teachers), {})),
        table(shown.title, columns(shown), models, compared, shown.notes),
    ]
    if windowed := [name for name in models if shown.form(name).windowed]:
        tables.append(_parts_table(shown, windowed, Compared(outcomes, {})))
    drawn = functools.partial(draw, models, shown, teachers, outcomes)
    return Report(tables, content, drawn if outcomes else None)


def _shares(one: Outcome) -> dict[str, dict[str, float | None]]:
    return {stage: {name: one.share(stage, name) for name in one.teacher} for stage in one.losses}


def _teacher_table(shown: Shown, teachers: Compared) -> Table:
    def number(name: str) -> Callable[[Sequence[Ran]], str]:
        return lambda ours: shown.cell([one.losses[name] for one in ours])

    known = (
        MODEL,
        Column("parameters", lambda ours: f"{ours[0].parameters:,}"),
        Column("trained for", known=lambda _: shown.length),
        *(Column(title, number(name)) for name, title in shown.numbers.items()),
        SEEDS,
        Column("seconds", lambda ours: f"{statistics.median(one.seconds for one in ours):,.0f}"),
    )
    return table("The teacher", known, [TEACHER], teachers, shown.teacher_notes)


def _parts_table(shown: Shown, windowed: list[str], compared: Compared) -> Table:
    def part(name: str) -> Callable[[Sequence[Outcome]], str]:
        return lambda ours: shown.cell([one.parts[name][TEST] for one in ours if name in one.parts])

    notes = [
        f"{shown.label}, after stage 2, of the same weights: with the whole attention; with the softmax window alone; "
        "with the linear attention alone, which then sees the tokens of the window too; with 0 in place of both",
        "layers of softmax attention, where there are some, stay as they are",
    ]
    known = (MODEL, *(Column(name, part(name)) for name in PARTS), SEEDS)
    return table("What the parts of an attention with a window do", known, windowed, compared, notes)


def draw(models: Sequence[str], shown: Shown, teachers: Sequence[Ran], outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the mean over seeds by stage: forms without softmax layers on the left, forms with some on the right."""
    sides = {
        "linear time in every layer": [name for name in models if not shown.form(name).softmax_layers],
        "with layers of softmax attention": [name for name in models if shown.form(name).softmax_layers],
    }
    sides = {title: ours for title, names in sides.items() if (ours := by_model(outcomes, names))}
    level = statistics.mean(shown.of(one.losses[TEST]) for one in teachers)
    with plt.rc_context(STYLE):
        size = (6.5 * len(sides), 4.8)
        figure, (row,) = plt.subplots(1, len(sides), figsize=size, layout="constrained", sharey=True, squeeze=False)
        for axes, (title, ours) in zip(row, sides.items()):
            _draw_stages(axes, ours, shown, level)
            axes.set_title(title)
        row[0].set_ylabel(shown.label)
        save(figure, path, dpi=130)


#: Stages by the words below the picture.
_WORDS = {
    EXCHANGED: "exchanged",
    TRANSFERRED: "after stage 1",
    DISTILLED: "after stage 2",
    SCRATCH: "from scratch,\nas long as both",
}


def _draw_stages(axes: Axes, ours: dict[str, Sequence[Outcome]], shown: Shown, level: float) -> None:
    axes.axhline(level, color="0.5", linestyle="--", label="teacher")
    for i, (name, seeds) in enumerate(ours.items()):
        points = {}
        for place, stage in enumerate(_WORDS):
            if found := [shown.of(one.losses[stage][TEST]) for one in seeds if stage in one.losses]:
                points[place] = statistics.mean(found)
        style = look(i)
        scratch = points.pop(len(_WORDS) - 1, None)
        axes.plot(list(points), list(points.values()), marker=style.marker, label=name, **style.line)
        if scratch is not None:
            axes.plot(len(_WORDS) - 1, scratch, marker=style.marker, color=style.colour)
    axes.set_xticks(range(len(_WORDS)), list(_WORDS.values()))
    if shown.logarithmic:
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both", axis="y")
    legend_beside(axes)
