"""The common style of the recipes' pictures. They are written to files, so no display is needed."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .working_folder import atomic_write

#: Options for matplotlib's ``rc_context``.
STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
#: The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Line styles, for readers in black and white.
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
#: Markers that go with the line styles.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Ticks of a logarithmic axis that spans little more than a decade, in times a power of ten.
STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
#: Ticks of axes that span more, the more of them first.
_FEWER_STEPS = ((1.0, 2.0, 3.0, 5.0), (1.0, 3.0), (1.0,))


class Style(NamedTuple):
    """How one of several models is drawn; no two of the first 49 look the same."""

    colour: str
    dash: Any  # matplotlib's linestyle
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """The look of a curve, as matplotlib's arguments."""
        return {"color": self.colour, "linestyle": self.dash}

    def curve(self, points: int) -> dict[str, Any]:
        """The look of a curve, as matplotlib's arguments. A single point makes no line, so it gets a dot."""
        return {**self.line, "marker": self.marker if points == 1 else ""}


def style_of(place: int) -> Style:
    """The look of model number ``place``: another colour each, then another line and marker."""
    turn = place // len(COLOURS) % len(DASHES)
    return Style(COLOURS[place % len(COLOURS)], DASHES[turn], MARKERS[turn])


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Write ``figure`` to a file of this command, completely or not at all (see ``atomic_write``), and close it."""
    try:
        with atomic_write(path) as part:
            figure.savefig(part, format=path.suffix.removeprefix(".") or None, **options)
    finally:
        plt.close(figure)


def legend_beside(axes: Axes, **options: Any) -> None:
    """Draw a legend to the right of ``axes``, where it hides nothing."""
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def logarithmic(axes: Axes, lengths: Sequence[int]) -> None:
    """Make both axes logarithmic, with plain numbers and x ticks at ``lengths``."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))


def label_upwards(axes: Axes, most: int = 12) -> None:
    """Label the logarithmic y axis of ``axes`` with at most ``most`` plain numbers, after everything is drawn on it."""
    low, high = axes.get_ylim()
    for steps in (STEPS, *_FEWER_STEPS):
        locator = LogLocator(subs=steps)
        if sum(low <= value <= high for value in locator.tick_values(low, high)) <= most:
            break
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


class Series(NamedTuple):
    """One model of a comparison, over its seeds."""

    name: str
    curves: Sequence[Sequence[tuple[int, float]]]  # per seed: update and value; updates of all seeds are shown
    across: float  # x coordinate of its dot
    values: Sequence[float]  # per seed; their mean is the y coordinate of its dot
    filled: bool  # whether the dot is filled


def curves_and_dots(models: Sequence[Series]) -> tuple[Figure, Axes, Axes]:
    """A figure with the mean curve of each model, and a dot with its deviation over seeds; one legend for both.

    Call, label and save it inside ``rc_context(STYLE)``.
    """
    figure, (curves, dots) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    legend = []
    for i, model in enumerate(models):
        model_look = style_of(i)
        dot = {
            "color": model_look.colour,
            "marker": model_look.marker,
            "mfc": model_look.colour if model.filled else "white",
        }
        points = [dict(curve) for curve in model.curves]
        # A training that was interrupted at its very end makes one more update, and is evaluated there as well.
        updates = [update for update in points[0] if all(update in seed_points for seed_points in points)]
        means = [statistics.mean(seed_points[update] for seed_points in points) for update in updates]
        curves.plot(updates, means, **model_look.curve(len(updates)))
        legend.append(Line2D([], [], linestyle=model_look.dash, label=model.name, **dot))
        mean = statistics.mean(model.values)
        deviation = statistics.stdev(model.values) if len(model.values) > 1 else 0.0
        dots.errorbar(model.across, mean, deviation, linestyle="", capsize=3, **dot)
    legend_beside(curves, handles=legend)
    for axes in (curves, dots):
        axes.grid(alpha=0.25, which="both")
    return figure, curves, dots


def seeds_in_rows(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each name: a dot for the value of each seed, and a line for their mean."""
    for row, of_seeds in enumerate(values.values()):
        if of_seeds:
            look = style_of(row)
            axes.plot(of_seeds, [row] * len(of_seeds), look.marker, color=look.colour, alpha=0.6)
            axes.plot(statistics.mean(of_seeds), row, "|", color="black", markersize=16)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.8)


def lines_by_length(axes: Axes, points: Mapping[str, Iterable[tuple[int, float]]]) -> None:
    """Draw a line for each name through its values by length, on logarithmic axes with a legend to the right."""
    lengths = set()
    for number, (name, of_name) in enumerate(points.items()):
        if ordered := sorted(of_name):
            lengths.update(length for length, _ in ordered)
            axes.plot(*zip(*ordered), marker=style_of(number).marker, label=name, **style_of(number).line)
    logarithmic(axes, sorted(lengths))
    axes.grid(alpha=0.25)
    if lengths:
        legend_beside(axes)
