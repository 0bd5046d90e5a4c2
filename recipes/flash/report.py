"""The picture of a comparison, as the paper's Figures 3 and 5 to 8 have it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from ..shared.experiment import Record
from ..shared.plots import STYLE, logarithmic, save, style_of
from .measurements import Comparison
from .models import ALL_MODELS, FIGURES

_COLUMNS = 3


def draw(options: Any, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw records: the figure of the paper that they are of, or else latency and perplexity against cost."""
    comparison = Comparison(options, records, facts.get("steps", ()))
    with plt.rc_context(STYLE):
        if any(ALL_MODELS[name].kind for name in options.models):
            _draw_sizes(comparison, path)
        else:
            _draw_costs(comparison, path)


def _draw_costs(comparison: Comparison, path: Path) -> None:
    """A panel for each length, perplexity against seconds of training, after one of seconds per step (Figures 5 to 8).

    Perplexity is drawn from the second evaluation on where there are more than three: the first is far above.
    """
    plan = comparison.options
    latency = plan.figure is None or FIGURES[plan.figure].latency
    count = len(plan.lengths) + latency
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.3 * columns, 3.4 * rows + 0.6), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    if latency:
        _latency(panels[0], comparison)
    for axes, length in zip(panels[latency:], plan.lengths):
        _cost(axes, comparison, length)
    handles = {label: handle for axes in panels[:count] for handle, label in zip(*axes.get_legend_handles_labels())}
    names = [ALL_MODELS[name].title for name in plan.models if ALL_MODELS[name].title in handles]
    legend = {"loc": "outside lower center", "ncols": min(4, 2 * columns, len(names)), "frameon": False}
    figure.legend([handles[name] for name in names], names, **legend)
    save(figure, path, dpi=130)


def _latency(axes: Axes, comparison: Comparison) -> None:
    """Seconds per step against length, both axes logarithmic: a straight line is a power of the length."""
    plan = comparison.options
    for i, name in enumerate(plan.models):
        steps = [(length, comparison.seconds_per_step(name, length)) for length in plan.lengths]
        points = [(length, seconds) for length, seconds in steps if seconds is not None]
        if points:
            ours = style_of(i)
            axes.plot(*zip(*points), **ours.line, marker=ours.marker, label=ALL_MODELS[name].title)
    axes.set(xlabel="tokens in a sequence", ylabel="seconds per training step")
    axes.set_title(f"{plan.tokens_per_update:,} tokens per step")
    logarithmic(axes, plan.lengths)
    axes.grid(alpha=0.25, which="both")


def _cost(axes: Axes, comparison: Comparison, length: int) -> None:
    """Perplexity of one length against seconds of training."""
    for i, name in enumerate(comparison.options.models):
        points = comparison.curve(name, length)
        points = points[1:] if len(points) > 3 else points
        if points:
            ours = style_of(i)
            axes.plot(*zip(*points), **ours.line, marker=ours.marker, markersize=4, label=ALL_MODELS[name].title)
    axes.set(xlabel="seconds of training", ylabel="perplexity", title=f"{length:,} tokens", yscale="log")
    _plain_numbers(axes)


def _draw_sizes(comparison: Comparison, path: Path) -> None:
    """Perplexity against seconds per step, a curve over the sizes of each kind of layer (Figure 3), at each length."""
    plan = comparison.options
    kinds = list(dict.fromkeys(ALL_MODELS[name].kind for name in plan.models))
    figure, grid = plt.subplots(
        1, len(plan.lengths), figsize=(5.5 * len(plan.lengths), 4.2), layout="constrained", squeeze=False
    )
    for axes, length in zip(grid.flat, plan.lengths):
        for i, kind in enumerate(kinds):
            names = [name for name in plan.models if ALL_MODELS[name].kind == kind]
            _sizes_of_kind(axes, comparison, names, length, i, kind)
        axes.set(xlabel="seconds per training step", ylabel="perplexity", title=f"{length:,} tokens", yscale="log")
        _plain_numbers(axes)
        axes.legend(frameon=False)
    save(figure, path, dpi=130)


def _sizes_of_kind(
    axes: Axes, comparison: Comparison, names: Sequence[str], length: int, place: int, kind: str
) -> None:
    points = []
    for name in names:
        measured = comparison.of(name, length)
        if measured:
            perplexity = sum(record["perplexity"] for record in measured) / len(measured)
            points.append((comparison.seconds_per_step(name, length), perplexity, ALL_MODELS[name].shape))
    if not points:
        return
    ours = style_of(place)
    axes.plot(*zip(*[point[:2] for point in points]), **ours.line, marker=ours.marker, label=kind or "others")
    for seconds, perplexity, shape in points:
        if shape is not None:
            axes.annotate(
                str(shape.width),
                (seconds, perplexity),
                textcoords="offset points",
                # Neighbours' sizes do not hide each other.
                xytext=(-4, -11) if place % 2 else (4, 4),
                ha="right" if place % 2 else "left",
                color=ours.colour,
                fontsize=8,
            )


def _plain_numbers(axes: Axes) -> None:
    """Some plain numbers on a logarithmic axis upwards that may span less than a power of ten."""
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.grid(alpha=0.25)
