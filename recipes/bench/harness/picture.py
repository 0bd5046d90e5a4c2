"""Time and memory by length, on logarithmic axes: a straight line is a power of the length."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ...shared.plots import COLOURS, DASHES, STYLE, save
from .records import Record, Results
from .work import Case


def draw(results: Results, cases: Mapping[str, Case], folder: Path) -> list[Path]:
    """Write one picture into ``folder`` for each case that was timed at two or more sizes; returns the paths."""
    paths = []
    for name in dict.fromkeys(record.case for record in results.timed()):
        records = [record for record in results.timed() if record.case == name]
        if cases[name].plotted and len({record.size for record in records}) > 1:
            paths.append(folder / f"{name}.png")
            _draw_case(cases[name], records, paths[-1])
    return paths


def _draw_case(case: Case, records: list[Record], path: Path) -> None:
    runs = list(dict.fromkeys(record.run for record in records))
    names = list(dict.fromkeys(record.form for record in records))
    with_memory = any(record.extra_bytes is not None for record in records)
    with plt.rc_context(STYLE):
        count = len(runs) + with_memory
        figure, panels = plt.subplots(1, count, figsize=(3.6 * count, 3.6), layout="constrained", squeeze=False)
        for axes, run in zip(panels[0], runs):
            run_records = [record for record in records if record.run == run]
            _lines(axes, run_records, names, lambda one: 1000 * one.median)
            _hollow(axes, [record for record in run_records if record.noisy])
            axes.set(title=f"{run}, ms" + ("; hollow: noisy" if any(record.noisy for record in run_records) else ""))
            axes.set(xlabel=case.axis)
        if with_memory:
            axes = panels[0][-1]
            last = [record for record in records if record.run == runs[-1] and record.extra_bytes]
            _lines(axes, last, names, lambda one: one.extra_bytes / 2**20)
            axes.set(title="peak memory beyond inputs and results, MiB", xlabel=case.axis)
            axes.title.set_fontsize(9)
        panels[0][0].legend(frameon=False, fontsize=8)
        figure.suptitle(case.title, fontsize=11)
        save(figure, path, dpi=75, pil_kwargs={"optimize": True})


def _hollow(axes: Axes, noisy: list[Record]) -> None:
    """Draw white centres on the dots of noisy times."""
    points = [(record.size, 1000 * record.median) for record in noisy]
    if points:
        axes.plot(*zip(*points), linestyle="", marker="o", markersize=1.8, color="white", zorder=3)


def _lines(axes: Axes, records: list[Record], names: list[str], value: Callable[[Record], float]) -> None:
    sizes = sorted({record.size for record in records})
    for name, colour, dash in zip(names, COLOURS, DASHES):
        points = sorted((record.size, value(record)) for record in records if record.form == name)
        if points:
            axes.plot(*zip(*points), linestyle=dash, marker="o", markersize=3, color=colour, label=name)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(alpha=0.25, which="both")
