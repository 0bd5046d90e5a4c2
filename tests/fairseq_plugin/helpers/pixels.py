"""Toy images and a data set of them."""

from pathlib import Path

import numpy as np

from fairseq_plugin.data.pixels import FIRST_TOKEN, ImageShape, pixel_dictionary
from recipes.texts import write_split

#: No two sides are equal, so that none can stand for another.
SHAPE = ImageShape(4, 5, 3)
COUNTS = {"train": 43, "valid": 9, "test": 7}


def toy_images(split: str, count: int) -> np.ndarray:
    """Images (N, H, W, C), uint8: ramps from a random corner value, so that there is something to learn."""
    rng = np.random.default_rng(sum(split.encode()))
    ramp = np.arange(SHAPE.length).reshape(SHAPE)
    return (rng.integers(0, 256, (count, 1, 1, 1)) + ramp).astype(np.uint8)


def write_pixels(folder: Path) -> Path:
    """A data set of toy images in ``folder``, token for token as its format is described."""
    folder.mkdir(parents=True, exist_ok=True)
    pixel_dictionary().save(str(folder / "dict.txt"))
    SHAPE.save(folder)
    for split, count in COUNTS.items():
        tokens = toy_images(split, count).reshape(count, -1).astype(np.int32) + FIRST_TOKEN
        write_split(folder, split, tokens, 260)
    return folder
