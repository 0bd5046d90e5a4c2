"""The common style of the recipes' pictures. They are written to files, so no display is needed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

#: Options for matplotlib's ``rc_context``.
STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
#: The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Line styles, for readers in black and white.
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
#: Dots that go with these styles.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Drawn(NamedTuple):
    """One model of a comparison, over its seeds."""

    name: str
    curves: Sequence[Sequence[tuple[int, float]]]  # of each seed: update and value, at the same updates
    across: float  # where its dot stands, to the right
    values: Sequence[float]  # of each seed: where its dot stands, upwards
    filled: bool  # whether the dot is


def curves_and_dots(models: Sequence[Drawn]) -> tuple[Figure, Axes, Axes]:
    """A figure of the mean curve of each model, and a dot with its deviation over seeds; one legend for both.

    To be called, labelled and saved inside of ``rc_context(STYLE)``.
    """
    figure, (curves, dots) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    legend = []
    for i, model in enumerate(models):
        turn = i // len(COLOURS) % len(DASHES)
        face = COLOURS[i % len(COLOURS)] if model.filled else "white"
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[turn], "mfc": face}
        updates = [update for update, _ in model.curves[0]]
        means = [statistics.mean(point[1] for point in at) for at in zip(*model.curves)]
        curves.plot(updates, means, color=look["color"], linestyle=DASHES[turn])
        legend.append(Line2D([], [], linestyle=DASHES[turn], label=model.name, **look))
        mean = statistics.mean(model.values)
        deviation = statistics.stdev(model.values) if len(model.values) > 1 else 0.0
        dots.errorbar(model.across, mean, deviation, linestyle="", capsize=3, **look)
    curves.legend(handles=legend, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (curves, dots):
        axes.grid(alpha=0.25, which="both")
    return figure, curves, dots
