"""Time and memory against length, all axes logarithmic: a straight line is a power of the length."""

from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ..plots import COLOURS, DASHES, STYLE
from .cases import CASES
from .records import Record, Results


def draw(results: Results, folder: Path) -> list[Path]:
    """One picture in ``folder`` for each case that was timed at two sizes or more; their paths."""
    paths = []
    for name in dict.fromkeys(one.case for one in results.timed()):
        records = [one for one in results.timed() if one.case == name]
        if CASES[name].plotted and len({one.size for one in records}) > 1:
            paths.append(folder / f"{name}.png")
            _draw_case(records, paths[-1])
    return paths


def _draw_case(records: list[Record], path: Path) -> None:
    case = CASES[records[0].case]
    runs = list(dict.fromkeys(one.run for one in records))
    forms = list(dict.fromkeys(one.form for one in records))
    with_memory = any(one.extra_bytes is not None for one in records)
    with plt.rc_context(STYLE):
        count = len(runs) + with_memory
        figure, panels = plt.subplots(1, count, figsize=(3.6 * count, 3.6), layout="constrained", squeeze=False)
        for axes, run in zip(panels[0], runs):
            _lines(axes, [one for one in records if one.run == run], forms, lambda one: 1000 * one.median)
            axes.set(title=f"{run}, ms", xlabel=case.axis)
        if with_memory:
            axes = panels[0][-1]
            last = [one for one in records if one.run == runs[-1] and one.extra_bytes]
            _lines(axes, last, forms, lambda one: one.extra_bytes / 2**20)
            axes.set(title="peak memory beyond inputs and results, MiB", xlabel=case.axis)
            axes.title.set_fontsize(9)
        panels[0][0].legend(frameon=False, fontsize=8)
        figure.suptitle(case.title, fontsize=11)
        figure.savefig(path, dpi=75, pil_kwargs={"optimize": True})
        plt.close(figure)


def _lines(axes: Axes, records: list[Record], forms: list[str], value: Callable[[Record], float]) -> None:
    sizes = sorted({one.size for one in records})
    for form, colour, dash in zip(forms, COLOURS, DASHES):
        points = sorted((one.size, value(one)) for one in records if one.form == form)
        if points:
            axes.plot(*zip(*points), linestyle=dash, marker="o", markersize=3, color=colour, label=form)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(alpha=0.25, which="both")
