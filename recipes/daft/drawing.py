"""Draw the two pictures: the position biases of every layer, and the keys of an image."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import FuncNorm, LogNorm, Normalize
from matplotlib.figure import Figure

from ..shared.plots import STYLE, save
from .maps import Bias, KeyMaps

#: White: no bias or an even share; blue: less; red: more; grey: no value.
_COLOURS = plt.get_cmap("RdBu_r").with_extremes(bad="#BBBBBB")
#: Fraction of the values inside the colour scale, so that an outlier does not make all others pale.
_INSIDE = 0.995
#: Values at which a colour bar may have ticks.
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_POWERS = tuple(10.0**power for power in range(1, 13))
#: Number of layers in a row if each layer is one panel.
_COLUMNS = 4


def draw_biases(biases: Sequence[Bias], heads: int, title: str, path: Path) -> None:
    """Write a picture of exp(w) - 1 in every layer: a matrix, or the filters of at most ``heads`` heads."""
    # Colours are linear in w, so that half and twice the weight are equally far from white.
    limit, beyond = _limit(np.concatenate([np.abs(_log1p(bias.values)).ravel() for bias in biases]))
    norm = FuncNorm((_log1p, np.expm1), np.expm1(-limit), np.expm1(limit))
    layers = [bias.values if bias.full else bias.values[:heads] for bias in biases]
    with plt.rc_context(STYLE):
        if layers[0].ndim == 3:
            figure, mappable = _rows(layers, norm, "head")
            for axes in figure.axes:  # a dot marks the token itself, in the middle of its window
                axes.plot(layers[0].shape[2] // 2, layers[0].shape[1] // 2, ".", color="black", ms=3)
        else:
            figure, mappable = _panels(biases, layers, norm)
        _bar(figure, mappable, "exp(w) - 1", beyond, _bias_ticks(limit))
        figure.suptitle(f"{title}: {_kind(biases[0])}{_heads_shown(biases[0], heads)}")
        _save(figure, path)


def draw_key_maps(maps: KeyMaps, heads: int, title: str, path: Path) -> None:
    """Write a picture of an image and the weights of its tokens by their keys, for each layer and ``heads`` heads."""
    layers = [layer[:heads] for layer in maps.layers]
    log_weights = np.concatenate([np.abs(np.log(layer)).ravel() for layer in layers])
    limit, beyond = _limit(log_weights)
    norm = LogNorm(np.exp(-limit), np.exp(limit))
    kind, count = maps.heads_are, maps.layers[0].shape[0]
    with plt.rc_context(STYLE):
        figure, mappable = _rows(layers, norm, kind, maps.image)
        _bar(figure, mappable, "exp(K) / its mean", beyond, _share_ticks(limit))
        shown_heads = f", {kind}s 1 to {heads} of {count}" if heads < count else f", {_number(count, kind)}"
        figure.suptitle(f"{title}: weights of tokens by their keys{shown_heads}")
        _save(figure, path)


def _kind(bias: Bias) -> str:
    if bias.full:
        return f"position biases of {bias.values.shape[0]} x {bias.values.shape[1]} tokens"
    window = " x ".join(map(str, bias.values.shape[1:]))
    return f"filters of {window} tokens"


def _heads_shown(bias: Bias, heads: int) -> str:
    """The part of the title that says which heads are shown."""
    if bias.full:
        return ""
    count = bias.values.shape[0]
    return f", heads 1 to {heads} of {count}" if heads < count else f", {_number(count, 'head')}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")


def _log1p(values: np.ndarray) -> np.ndarray:
    """The inverse of expm1; finite even for values rounded to -1."""
    return np.log1p(np.maximum(values, -1 + 1e-12))


def _limit(sizes: np.ndarray) -> tuple[float, bool]:
    """The end of a colour scale for ``sizes`` (absolute logarithms), and whether any value lies beyond it."""
    sizes = sizes[np.isfinite(sizes)]
    limit = float(np.quantile(sizes, _INSIDE))
    if limit < 1e-6:  # all biases of a new model are 0
        return 1.0, False
    return limit, bool(sizes.max() > limit * 1.001)


def _bias_ticks(limit: float) -> dict[float, str]:
    """Tick -> label for exp(w) - 1 with |w| up to ``limit``: 0 and round numbers."""
    rounds = [*_STEPS, 2.0, 5.0, *_POWERS, *(-step for step in _STEPS[:-1]), -0.8, -0.9, -0.99, -0.999, -0.9999]
    return _spread({float(_log1p(tick)): (tick, f"{tick:g}") for tick in rounds}, limit, (0.0, "0"))


def _share_ticks(limit: float) -> dict[float, str]:
    """Tick -> label for shares with logarithms up to ``limit``: 1, round numbers and their inverses."""
    rounds = [*(1 + step for step in _STEPS), 3.0, 5.0, *_POWERS]
    above = {float(np.log(tick)): (tick, f"{tick:g}") for tick in rounds}
    below = {-position: (1 / tick, f"1/{label}") for position, (tick, label) in above.items()}
    return _spread({**above, **below}, limit, (1.0, "1"))


def _spread(ticks: dict[float, tuple[float, str]], limit: float, middle: tuple[float, str]) -> dict[float, str]:
    """Select ticks that do not overlap, outermost first; ``ticks`` maps positions on the bar to (tick, label)."""
    selected = {0.0: middle}
    for position in sorted(ticks, key=abs, reverse=True):
        if abs(position) <= limit and all(abs(position - other_position) >= limit / 6 for other_position in selected):
            selected[position] = ticks[position]
    return dict(selected[position] for position in sorted(selected))


def _bar(figure: Figure, shown: ScalarMappable, label: str, beyond: bool, ticks: dict[float, str]) -> None:
    """Draw one colour bar for all panels, at most 4 inches tall."""
    shrink, extend = min(1.0, 4.0 / figure.get_figheight()), "both" if beyond else "neither"
    bar = figure.colorbar(shown, ax=figure.axes, extend=extend, shrink=shrink, pad=0.02, aspect=25)
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.minorticks_off()
    bar.set_label(label)


def _rows(
    layers: Sequence[np.ndarray], norm: Normalize, kind: str, image: np.ndarray | None = None
) -> tuple[Figure, ScalarMappable]:
    """Draw a row per layer (heads, Y, X) and a column per head, with ``image`` to the left of the first row."""
    columns, offset = max(len(layer) for layer in layers), int(image is not None)
    height = layers[0].shape[1] / layers[0].shape[2]
    size = (0.95 * (columns + offset) + 1.9, 0.95 * height * len(layers) + 0.8)
    figure, grid = plt.subplots(len(layers), columns + offset, figsize=size, squeeze=False, layout="compressed")
    figure.get_layout_engine().set(h_pad=0.03, hspace=0.02)
    for number, (axes_row, layer) in enumerate(zip(grid, layers), 1):
        for axes in axes_row:
            _bare(axes)
        for axes, values in zip(axes_row[offset:], layer):
            mappable = axes.imshow(values, cmap=_COLOURS, norm=norm, interpolation="nearest")
        axes_row[offset].set_ylabel(f"layer {number}", rotation=0, ha="right", va="center")
    for number, axes in enumerate(grid[0, offset:], 1):
        axes.set_title(f"{kind} {number}", fontsize=9)
    if image is not None:
        grid[0, 0].imshow(image, cmap="gray", vmin=0, vmax=1)
        grid[0, 0].set_title("image", fontsize=9)
        for axes in grid[:, 0]:
            axes.spines[:].set_visible(False)
    return figure, mappable


def _panels(biases: Sequence[Bias], layers: Sequence[np.ndarray], norm: Normalize) -> tuple[Figure, ScalarMappable]:
    """Draw a panel per layer: a matrix (tokens, tokens), or one row of window weights per head."""
    columns = min(_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    height = 3.2 if biases[0].full else 0.22 * max(len(layer) for layer in layers) + 0.9
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.9 * columns + 1.2, height * rows + 0.7), squeeze=False, layout="compressed"
    )
    for axes in grid.flat[len(layers) :]:
        axes.set_axis_off()
    for number, (axes, bias, values) in enumerate(zip(grid.flat, biases, layers), 1):
        options = {"cmap": _COLOURS, "norm": norm}
        if bias.full:
            mappable = axes.imshow(values, **options)
            names = "token seen", "token"
        else:
            window = values.shape[1]
            first = -(window - 1) if bias.causal else -(window // 2)
            extent = (first - 0.5, first + window - 0.5, len(values) + 0.5, 0.5)
            mappable = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, **options)
            names = "distance of the token seen", "head"
            axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"layer {number}")
        lowest, leftmost = number + columns > len(layers), number % columns == 1 % columns
        axes.tick_params(labelbottom=lowest, labelleft=leftmost)
        axes.set(xlabel=names[0] if lowest else "", ylabel=names[1] if leftmost else "")
    return figure, mappable


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    save(figure, path, dpi=130, bbox_inches="tight")
