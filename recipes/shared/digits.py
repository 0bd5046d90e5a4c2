"""scikit-learn's bundled handwritten digits as an image folder: 1797 images of 8 x 8 pixels, from 43 writers."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

#: Side of the written images; the originals are 8 x 8 with values 0..16.
SIDE = 32
VALIDATION_DIGITS = 360
_LARGEST_VALUE = 16


def write_digits(folder: Path, side: int = SIDE, validation: int = VALIDATION_DIGITS) -> dict[str, int]:
    """Write ``folder``/{train,validation}/<digit>/<index>.png, stratified by digit; returns images per split."""
    pixels, labels = load_digits(return_X_y=True)
    indices = np.arange(len(labels))
    splits = dict(
        zip(("train", "validation"), train_test_split(indices, test_size=validation, stratify=labels, random_state=0))
    )
    for split, members in splits.items():
        for index in members:
            values = pixels[index].reshape(8, 8) * (255 / _LARGEST_VALUE)
            image = Image.fromarray(values.round().astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
            path = folder / split / str(labels[index]) / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return {split: len(members) for split, members in splits.items()}
