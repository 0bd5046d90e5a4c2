"""A picture of completed images: the original, its upper half, and the samples."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from ..shared.plots import STYLE, save

#: Inches of one image in the picture, and of the row of titles.
_SIDE, _TITLE = 1.1, 0.35
#: The colour of the missing half.
_GREY = 128


class Completions(NamedTuple):
    """Images and the completions of their upper halves, uint8."""

    originals: np.ndarray  # (N, H, W, C)
    samples: np.ndarray  # (N, S, H, W, C)
    known_rows: int


def draw(completions: Completions, path: Path) -> None:
    """Write a picture with one row per image: the original, its upper half, and the samples."""
    originals, samples, known_rows = completions
    halves = originals.copy()
    halves[:, known_rows:] = _GREY
    titles = ["original", "upper half", *(f"sample {number}" for number in range(1, samples.shape[1] + 1))]
    rows = [[original, half, *drawn] for original, half, drawn in zip(originals, halves, samples)]
    height = originals.shape[1] / originals.shape[2] * len(rows) * _SIDE + _TITLE
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(rows), len(titles), figsize=(len(titles) * _SIDE, height), squeeze=False, layout="constrained"
        )
        for axes_row, images in zip(grid, rows):
            for axes, image in zip(axes_row, images):
                _show(axes, image)
        for axes, title in zip(grid[0], titles):
            axes.set_title(title, fontsize=9)
        save(figure, path, dpi=160)


def _show(axes: plt.Axes, image: np.ndarray) -> None:
    """Show one image (H, W, C) without interpolation."""
    pixels = image[..., 0] if image.shape[-1] == 1 else image  # (H, W, 1) -> (H, W)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_axis_off()
