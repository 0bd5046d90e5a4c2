"""Images as sequences of symbols, stored as fairseq's indexed datasets.

An image of H x W pixels with C channels is T = H W C tokens: row by row, pixel by pixel, channels innermost. One token
is one subpixel's value, 0..255, and nothing marks the end of an image. In addition to fairseq's ``dict.txt``,
``<split>.bin`` and ``<split>.idx``, the folder holds the shape of the images.
"""

import json
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary
from torch import Tensor

from common.files.json_files import read, signed
from common.ops.shared.checks import shortened

SHAPE_FILE = "image_shape.json"
#: The number of values of a subpixel.
VALUES = 256
#: The token of value 0; smaller tokens are fairseq's special symbols.
FIRST_TOKEN = len(Dictionary())


class ImageShape(NamedTuple):
    """Height, width and channels of an image, needed to convert a sequence back to an image."""

    height: int
    width: int
    channels: int

    @property
    def length(self) -> int:
        """The number of tokens of an image."""
        return self.height * self.width * self.channels

    def save(self, folder: Path) -> None:
        """Write the shape into a folder of binarised images."""
        (folder / SHAPE_FILE).write_text(json.dumps(signed(self._asdict())) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "ImageShape":
        """The shape of the images in a folder.

        Raises:
            ValueError: the folder has no shape, or an invalid one.
        """
        path = folder / SHAPE_FILE
        fields = ", ".join(cls._fields)
        if not path.exists():
            raise ValueError(
                f"{folder} lacks {SHAPE_FILE}; allowed: a folder that recipes.cifar10_pixels.data has written"
            )
        content = read(path, f"JSON with {fields}")
        if not isinstance(content, dict) or set(content) != set(cls._fields):
            raise ValueError(f"{path} holds {shortened(content)}; allowed: an object with {fields} and nothing else")
        if not all(type(value) is int and value >= 1 for value in content.values()):
            raise ValueError(f"{path} holds {shortened(content)}; allowed: integers of at least 1")
        return cls(**content)


def pixel_dictionary() -> Dictionary:
    """fairseq's dictionary of the 256 values: ``FIRST_TOKEN`` + b is the token of b, named by its decimal digits."""
    dictionary = Dictionary()
    for value in range(VALUES):
        dictionary.add_symbol(str(value))
    return dictionary


def to_tokens(images: Tensor) -> Tensor:
    """Images (B, H, W, C) of values 0..255 as tokens (B, T), int64."""
    return images.flatten(1).long() + FIRST_TOKEN  # (B, H, W, C) -> (B, T)


def to_images(tokens: Tensor, shape: ImageShape) -> Tensor:
    """Tokens (B, T) as images (B, H, W, C) of values 0..255, int64.

    Raises:
        ValueError: T is not the length of an image, or a token is not a subpixel.
    """
    if tokens.dim() != 2 or tokens.size(1) != shape.length:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; allowed: (images, {shape.length}), as {shape} has")
    values = tokens - FIRST_TOKEN
    if ((values < 0) | (values >= VALUES)).any():
        raise ValueError(
            f"tokens are {int(tokens.min())}..{int(tokens.max())}; allowed: {FIRST_TOKEN}..{FIRST_TOKEN + VALUES - 1}"
        )
    return values.view(-1, *shape)  # (B, T) -> (B, H, W, C)
