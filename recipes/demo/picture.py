"""Draw the demo's picture: the training curves and Flow-Attention's weights."""

from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..shared.fairseq_log import Point
from ..shared.plots import COLOURS, DASHES, STYLE, save
from .images import ImageResult, Maps
from .text import ARCHITECTURES, LanguageModel, TextResult

_COLOURS = dict(zip(ARCHITECTURES, COLOURS))
_DASHES = dict(zip(ARCHITECTURES, DASHES))


def draw(text: TextResult, images: ImageResult, path: Path) -> None:
    """Write the picture to ``path``."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13.5, 10.5), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
        above, below = figure.subfigures(2, 1, height_ratios=(1, 1.55))
        left, middle, right = above.subplots(1, 3)
        _losses(left, text.models, lambda point: point.update, "updates")
        _losses(middle, text.models, lambda point: point.values["wall"], "seconds of training")
        left.legend(frameon=False)
        _digits(right, images)
        _maps(below, images.maps)
        save(figure, path, dpi=130)


def _losses(axes: Axes, models: list[LanguageModel], x: Callable[[Point], float], unit: str) -> None:
    for model in models:
        style = {"color": _COLOURS[model.architecture]}
        points = {
            split: [(x(point), point.values["loss"]) for point in model.points if point.split == split]
            for split in ("train_inner", "valid")
        }
        dashes = _DASHES[model.architecture]
        axes.plot(*zip(*points["train_inner"]), dashes, lw=1.4, alpha=0.75, label=model.architecture, **style)
        if points["valid"]:
            axes.plot(*zip(*points["valid"]), "o", ms=5, **style)
    axes.set_title("Language models: line train, dot valid")
    axes.set_xlabel(unit)
    axes.set_ylabel("loss, bits per token")
    axes.grid(alpha=0.25)


def _digits(axes: Axes, images: ImageResult) -> None:
    epochs = [epoch.epoch + 1 for epoch in images.epochs]
    axes.plot(epochs, [epoch.train_loss for epoch in images.epochs], color="#555555", lw=1.4, label="train loss")
    axes.plot(
        epochs,
        [epoch.valid_loss for epoch in images.epochs],
        "o-",
        color="#555555",
        ms=4,
        lw=0.8,
        label="held-out loss",
    )
    axes.set_title("flowformer_hier_digits: handwritten digits")
    axes.set_xlabel("epochs")
    axes.set_ylabel("loss, nats per image")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    accuracy = axes.twinx()
    accuracy.spines["right"].set_visible(True)
    accuracy.plot(epochs, [epoch.top1 for epoch in images.epochs], color="#CC79A7", lw=2, label="held-out accuracy")
    accuracy.set_ylabel("held-out accuracy, %", color="#CC79A7")
    accuracy.tick_params(axis="y", colors="#CC79A7")
    accuracy.set_ylim(0, 101)
    handles = [*axes.get_lines(), *accuracy.get_lines()]
    accuracy.legend(handles, [line.get_label() for line in handles], frameon=False, loc="center right")


def _maps(figure: Figure, maps: Maps) -> None:
    side = maps.competition.shape[-1]
    figure.suptitle(f"Flow-Attention's weights in {maps.layer}: {side} x {side} tokens, mean over heads", fontsize=12)
    rows = (
        ("held-out digit", "ink, 0..1", maps.images, "gray", (0, 1)),
        (
            "competition: how much\na source may send\n(1 = its even share;\nclamped above)",
            "weight",
            maps.competition,
            "viridis",
            None,
        ),
        ("allocation: how much\na sink lets in\n(0..1)", "weight", maps.allocation, "magma", None),
    )
    grid = figure.subplots(len(rows), len(maps.labels), squeeze=False)
    for axes_row, (title, unit, values, colours, limits) in zip(grid, rows):
        low, high = limits or (values.min(), values.max())
        for axes, value in zip(axes_row, values):
            # A pixel of a map is a token: no smoothing.
            mappable = axes.imshow(value, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        axes_row[0].set_ylabel(title, rotation=0, ha="right", va="center", labelpad=8)
        figure.colorbar(mappable, ax=axes_row, label=unit, shrink=0.9, pad=0.015)
    for axes, label, prediction in zip(grid[0], maps.labels, maps.predictions):
        axes.set_title(f"{label}, read as {prediction}", color="black" if label == prediction else "#D00000")
