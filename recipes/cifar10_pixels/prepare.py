"""Write CIFAR-10 as sequences of subpixels: ``python -m recipes.cifar10_pixels.prepare`` from the checkout's root.

``--file`` uses an archive that you already have; ``--images`` uses any folder of images, to try the commands.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.data.pixels import FIRST_TOKEN, ImageShape, pixel_dictionary

from ..shared.cifar10 import read_labelled
from ..shared.commands import shown_path
from ..shared.download import find_file
from ..shared.image_folder import read_image
from ..shared.indexed_files import count_tokens, write_dictionary, write_split
from ..shared.scripts import positive_int, script
from ..shared.sources import SOURCES
from ..shared.text_files import cut_trial
from ..shared.working_folder import working_folder

COMMAND = "recipes.cifar10_pixels.prepare"

SHAPE = ImageShape(32, 32, 3)
#: The last images of the training files are held out for validation.
HELD_OUT = 1_000


class Split(NamedTuple):
    """Images (H, W, C), uint8, and how many there are."""

    images: Iterable[np.ndarray]
    count: int


def read_archive(path: Path) -> dict[str, Split]:
    """Read all splits of CIFAR-10 into memory (180 MB); the last training images become the valid split.

    Raises:
        ValueError: the archive is damaged or lacks a file.
    """
    parts = read_labelled(path)
    (train, _), (test, _) = parts["train"], parts["test"]
    splits = {"train": train[:-HELD_OUT], "valid": train[-HELD_OUT:], "test": test}
    return {split: Split(images, len(images)) for split, images in splits.items()}


def read_folder(folder: Path, size: int, grey: bool) -> dict[str, Split]:
    """Split the images below a folder into 90, 5 and 5 per cent; an image is read when the iteration reaches it.

    Files are ordered by a hash of their names, so the split depends only on the names.

    Args:
        size: side of the square that images are resized and centre cropped to.
        grey: one channel instead of three.

    Raises:
        ValueError: the folder does not exist or has too few images.
    """
    if not folder.is_dir():
        raise ValueError(f"--images is {folder}, which is no folder; allowed: a folder of images")
    suffixes = Image.registered_extensions()
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file()]
    parts = cut_trial(len(paths), f"--images is {folder} with {len(paths)} images")
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).hexdigest())
    return {
        split: Split((read_image(paths[index], size, grey) for index in indices), len(indices))
        for split, indices in parts.items()
    }


def binarise(splits: dict[str, Split], shape: ImageShape, data_bin: Path) -> None:
    """Write the images and their shape as a fairseq data set."""
    dictionary = pixel_dictionary()
    total = sum(split.count for split in splits.values())
    with new_folder(data_bin, COMMAND) as folder, tqdm(total=total, unit=" images", disable=None) as bar:
        write_dictionary(folder, dictionary)
        shape.save(folder)
        for name, split in splits.items():
            write_split(folder, name, _tokens(split.images, bar), len(dictionary))


def _tokens(images: Iterable[np.ndarray], bar: tqdm) -> Iterator[np.ndarray]:
    for image in images:
        bar.update()
        yield image.reshape(-1).astype(np.int32) + FIRST_TOKEN  # (H, W, C) -> (T,)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.cifar10_pixels.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/cifar10_pixels"), help="default: %(default)s")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--file", type=Path, help="the archive cifar-10-binary.tar.gz you have")
    source.add_argument("--images", type=Path, metavar="FOLDER", help="images for a trial, in place of CIFAR-10")
    parser.add_argument("--size", type=positive_int, help="side of the images of --images; default: 32")
    parser.add_argument("--grey", action="store_true", help="one channel in place of three, of the images of --images")
    return parser


@script("prepare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": COMMAND}):
        splits, shape = _read(options, out)
        binarise(splits, shape, out / "data-bin")
    for name, split in splits.items():
        tokens = count_tokens(out / "data-bin", name)
        print(f"  {name:<5}  {split.count:6,d} images  {tokens:11,d} subpixels, {shape.length} an image")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/cifar10_pixels/README.md.")
    return 0


def _read(options: argparse.Namespace, out: Path) -> tuple[dict[str, Split], ImageShape]:
    if options.images is not None:
        size = options.size or SHAPE.height
        shape = ImageShape(size, size, 1 if options.grey else 3)
        return read_folder(options.images, size, options.grey), shape
    if options.size is not None or options.grey:
        raise ValueError("--size or --grey was passed without --images; allowed: CIFAR-10 as it is, 32 x 32 x 3")
    return read_archive(find_file(options.file, SOURCES["cifar10"], out)), SHAPE


if __name__ == "__main__":
    sys.exit(main())
