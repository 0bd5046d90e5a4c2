"""Write Image, CIFAR-10 in grey as sequences of pixels: ``python -m recipes.lra.image`` from the checkout's root.

The first 45,000 training images are for training, the last 5,000 for validation. The token of a pixel is its grey
value; black is a value like any other. ``--file`` uses an archive that you already have.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import FIRST_TOKEN, pixel_dictionary

from ..shared.cifar10 import read_labelled
from ..shared.commands import shown_path
from ..shared.download import find_file
from ..shared.scripts import script
from ..shared.sources import SOURCES
from ..shared.working_folder import working_folder
from .examples import WRITER, Example, write_examples

COMMAND = "recipes.lra.image"
CLASSES = 10
HELD_OUT = 5_000
#: Weights of red, green and blue in grey, those of TensorFlow's ``rgb_to_grayscale``.
_GREY = np.array([0.2989, 0.587, 0.114], np.float32)


def to_grey(image: np.ndarray) -> np.ndarray:
    """Convert an image (H, W, 3), uint8, to grey (H, W), rounded down."""
    return (image.astype(np.float32) @ _GREY).astype(np.uint8)


def examples(images: np.ndarray, labels: np.ndarray) -> Iterator[Example]:
    """Yield images (N, H, W, 3), uint8, as sequences of H W tokens, row by row."""
    for image, label in zip(images, labels, strict=True):
        yield Example((to_grey(image).reshape(-1).astype(np.int32) + FIRST_TOKEN,), int(label))


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.image", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/lra/image"), help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="the archive cifar-10-binary.tar.gz you have")
    return parser


@script("image")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        write(find_file(options.file, SOURCES["cifar10"], out), out)
    return 0


def write(path: Path, out: Path) -> None:
    """Write ``out``/data-bin from the archive ``path``."""
    parts = read_labelled(path)
    (images, labels), test = parts["train"], parts["test"]
    splits = {
        "train": (images[:-HELD_OUT], labels[:-HELD_OUT]),
        "valid": (images[-HELD_OUT:], labels[-HELD_OUT:]),
        "test": test,
    }
    total = sum(len(labels) for _, labels in splits.values())
    examples_of_splits = {name: examples(*split) for name, split in splits.items()}
    for name, count in write_examples(out / "data-bin", examples_of_splits, pixel_dictionary(), CLASSES, total).items():
        print(f"  {name:<5}  {count:6,d} images")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")


if __name__ == "__main__":
    sys.exit(main())
