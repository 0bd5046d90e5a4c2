"""The pictures of a comparison, as the paper's Figures 3 and 5 to 8 have them."""

import argparse
from collections.abc import Sequence

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from .. import runs
from .models import ALL_MODELS, FIGURES

Curves = dict[tuple[str, int], list[tuple[float, float]]]


def seconds_until(curve: Sequence[tuple[float, float]], perplexity: float) -> float | None:
    """When a curve of seconds and perplexities first is at ``perplexity`` or below, by lines; None if never."""
    for i, (seconds, value) in enumerate(curve):
        if value <= perplexity:
            if i == 0:
                return seconds
            before, higher = curve[i - 1]
            return before + (seconds - before) * (higher - perplexity) / (higher - value)
    return None


def draw(options: argparse.Namespace, found: pd.DataFrame, curves: Curves) -> None:
    """Draw speed.png: the figure of the paper, or else latency and perplexity against cost."""
    sizes = any(ALL_MODELS[name].kind for name in options.archs)
    figure = _sizes(found) if sizes else _costs(options, found, curves)
    figure.savefig(options.out / "speed.png", dpi=130)


def _costs(options: argparse.Namespace, found: pd.DataFrame, curves: Curves) -> plt.Figure:
    """A panel for each length, perplexity against seconds of training, after one of seconds per step (Figures 5 to 8).

    With one length the first panel has the last perplexity, a dot for each seed. Perplexity is drawn from the second
    evaluation on where there are more than three: the first is far above.
    """
    several = len(options.lengths) > 1
    latency = options.figure is None or FIGURES[options.figure].latency or not several
    count = len(options.lengths) + latency
    rows, columns = -(-count // 3), min(3, count)
    height = max(3.4, 0.27 * len(options.archs) * (not several))
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.3 * columns, height * rows + 0.6), layout="constrained", squeeze=False
    )
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    if not several:
        runs.dots(grid.flat[0], found.assign(model=[ALL_MODELS[name].title for name in found.model]), "perplexity")
        grid.flat[0].set(xlabel="perplexity after the last update")
    elif latency:
        for name, steps in found.groupby("model", sort=False):
            grid.flat[0].plot(steps.groupby("length").step.median(), marker="o", label=ALL_MODELS[name].title)
        grid.flat[0].set(xlabel="tokens in a sequence", ylabel="seconds per training step", xscale="log", yscale="log")
        grid.flat[0].set_xticks(options.lengths, [f"{length:,}" for length in options.lengths])
        grid.flat[0].xaxis.set_minor_locator(NullLocator())
    for axes, length in zip(grid.flat[latency:], options.lengths):
        for i, name in enumerate(options.archs):
            points = curves.get((name, length), [])
            points = points[1:] if len(points) > 3 else points
            if points:
                form = {"marker": "o", "linestyle": "-"} if i < 10 else {"marker": "s", "linestyle": "--"}
                axes.plot(*zip(*points), **form, markersize=4, label=ALL_MODELS[name].title)
        axes.set(xlabel="seconds of training", ylabel="perplexity", title=f"{length:,} tokens")
        _logarithmic(axes)
    handles, labels = grid.flat[count - 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, 2 * columns), frameon=False)
    return figure


def _sizes(found: pd.DataFrame) -> plt.Figure:
    """Perplexity against seconds per step, a curve over the sizes of each kind of layer (Figure 3), at each length."""
    lengths = sorted(found.length.unique())
    figure, grid = plt.subplots(1, len(lengths), figsize=(5.5 * len(lengths), 4.2), layout="constrained", squeeze=False)
    means = found.groupby(["length", "model"], sort=False)[["step", "perplexity"]].mean().reset_index()
    means["kind"] = [ALL_MODELS[name].kind or "others" for name in means.model]
    for axes, length in zip(grid.flat, lengths):
        for kind, rows in means[means.length == length].groupby("kind", sort=False):
            (line,) = axes.plot(rows.step, rows.perplexity, marker="o", label=kind)
            for name, seconds, perplexity in zip(rows.model, rows.step, rows.perplexity):
                if shape := ALL_MODELS[name].shape:
                    label = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": 8, "color": line.get_color()}
                    axes.annotate(str(shape.width), (seconds, perplexity), **label)
        axes.set(xlabel="seconds per training step", ylabel="perplexity", title=f"{length:,} tokens")
        axes.legend(frameon=False)
        _logarithmic(axes)
    return figure


def _logarithmic(axes: plt.Axes) -> None:
    """Some plain numbers on a logarithmic axis upwards that may span less than a power of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
