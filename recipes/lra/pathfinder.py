"""Write Pathfinder, images of paths as sequences of pixels: ``python -m recipes.lra.pathfinder`` from the root.

The label says whether a path of dashes connects two circles. Reads the release's
``pathfinder32/curv_contour_length_14``: the first 80 per cent for training, 10 for validation, 10 for the test. Without
``--file`` the whole release is downloaded, 8.2 GB.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import FIRST_TOKEN, pixel_dictionary

from ..shared.commands import shown_path
from ..shared.scripts import script
from ..shared.text_files import read_lines
from ..shared.working_folder import working_folder
from .examples import WRITER, Example, write_examples
from .release import find_one, find_release

COMMAND = "recipes.lra.pathfinder"
#: The hard difficulty level: paths of 14 dashes in images of 32 x 32 pixels.
DIFFICULTY = "curv_contour_length_14"
RESOLUTION = "pathfinder32"
SIDE = 32
CLASSES = 2
SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
_COLUMNS = 4  # folder, file, number, label; further columns describe how the image was drawn


class Picture(NamedTuple):
    """One image, and the place of its metadata line."""

    place: str
    path: Path
    label: int


def read_pictures(folder: Path) -> list[Picture]:
    """The images listed in ``folder``/metadata/*.npy, which are text files, in the order of their numbers.

    The release has one empty image file, which is skipped.

    Raises:
        ValueError: there is no metadata, a line has wrong columns or a wrong label, or an image is missing.
    """
    files = sorted((folder / "metadata").glob("*.npy"), key=_number)
    if not files:
        raise ValueError(f"{folder} has no metadata/*.npy; allowed: the release's {RESOLUTION}/{DIFFICULTY}")
    pictures = []
    for file in files:
        for number, line in enumerate(read_lines(file), 1):
            location, cells = f"{file}, line {number}", line.split()
            if len(cells) < _COLUMNS or cells[3] not in ("0", "1"):
                raise ValueError(f"{location} is {line[:60]!r}; allowed: folder, file, number, label 0 or 1, ...")
            path = folder / cells[0] / cells[1]
            if not path.is_file():
                raise ValueError(f"{location} names {path}, which does not exist; allowed: an image of the release")
            if path.stat().st_size:
                pictures.append(Picture(location, path, int(cells[3])))
    return pictures


def _number(file: Path) -> int:
    if not file.stem.isdigit():
        raise ValueError(f"{file} has a name that is no number; allowed: 0.npy, 1.npy, ... of the release")
    return int(file.stem)


def cut(pictures: list[Picture]) -> dict[str, list[Picture]]:
    """Split into train, valid and test, in order."""
    splits, start, share = {}, 0, 0.0
    for name, split_share in SHARES.items():
        share += split_share
        end = round(share * len(pictures))
        splits[name] = pictures[start:end]
        start = end
    return splits


def examples(pictures: Iterable[Picture]) -> Iterator[Example]:
    """Yield images as sequences of grey values, row by row.

    Raises:
        ValueError: an image cannot be read, or has another size.
    """
    for picture in pictures:
        try:
            with Image.open(picture.path) as image:
                pixels = np.asarray(image.convert("L"))
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise ValueError(f"{picture.path} cannot be read: {error}; allowed: the release's images") from error
        if pixels.shape != (SIDE, SIDE):
            raise ValueError(f"{picture.path} is of {pixels.shape} pixels; allowed: {SIDE} x {SIDE}")
        yield Example((pixels.reshape(-1).astype(np.int32) + FIRST_TOKEN,), picture.label)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.pathfinder", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/lra/pathfinder"), help="default: %(default)s")
    parser.add_argument(
        "--file", type=Path, help=f"lra_release.gz, or a folder that contains {RESOLUTION}/{DIFFICULTY}"
    )
    return parser


@script("pathfinder")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        write(options.file, out)
    return 0


def write(file: Path | None, out: Path) -> None:
    """Write ``out``/data-bin from the release ``file``, or from its download."""
    prefix = f"{RESOLUTION}/{DIFFICULTY}/"
    folder = find_release(file, out, lambda member: prefix in member, f"folder {prefix}")
    splits = cut(read_pictures(find_one(folder, f"{RESOLUTION}/{DIFFICULTY}")))
    total = sum(map(len, splits.values()))
    examples_of_splits = {name: examples(pictures) for name, pictures in splits.items()}
    for name, count in write_examples(out / "data-bin", examples_of_splits, pixel_dictionary(), CLASSES, total).items():
        print(f"  {name:<5}  {count:7,d} images")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")


if __name__ == "__main__":
    sys.exit(main())
