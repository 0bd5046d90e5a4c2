"""A tiny folder of images in timm's layout."""

from pathlib import Path

import numpy as np

from recipes.images import write_images


def write_few(folder: Path, side: int = 8) -> Path:
    """24 grey images to learn from and 12 held out, of two classes that differ in brightness; returns ``folder``."""
    labels = np.arange(36) % 2
    noise = np.random.default_rng(0).integers(0, 100, (36, side, side))
    write_images(folder, (noise + 150 * labels[:, None, None]).astype(np.uint8), labels, 12)
    return folder
