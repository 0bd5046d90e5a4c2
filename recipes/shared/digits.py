"""scikit-learn's bundled handwritten digits as an image folder: 1797 images of 8 x 8 pixels, from 13 writers."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from .image_folder import write_stratified

#: Side of the written images; the originals are 8 x 8 with values 0..16.
SIDE = 32
VALIDATION_DIGITS = 360
_LARGEST_VALUE = 16


def write_digits(folder: Path, side: int = SIDE, validation: int = VALIDATION_DIGITS) -> dict[str, int]:
    """Write ``folder``/{train,validation}/<digit>/<index>.png, stratified by digit; returns images per split."""
    pixels, labels = load_digits(return_X_y=True)
    values = (pixels.reshape(-1, 8, 8) * (255 / _LARGEST_VALUE)).round().astype(np.uint8)
    images = [np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)) for image in values]
    return write_stratified(folder, np.stack(images), labels, validation)
