"""Write Text, reviews of IMDb as bytes: ``python -m recipes.lra.text`` from the checkout's root.

25,000 reviews to train with, of which every class's last tenth is held out for validation (the Arena validates on the
test split), and 25,000 to test. ``--file`` takes the archive if you have it.
"""

import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import pixel_dictionary

from ..shared.commands import shown_path
from ..shared.download import find_file
from ..shared.scripts import positive_int, script
from ..shared.sources import SOURCES
from ..shared.working_folder import working_folder
from .byte_text import to_tokens
from .examples import WRITER, Example, write_examples

COMMAND = "recipes.lra.text"
CLASSES = ("neg", "pos")
#: Bytes of a review in the Arena's configurations.
LONGEST = 1_000
_HELD_OUT = 0.1
_MEMBER = re.compile(r"(?:^|/)(train|test)/(neg|pos)/(\d+)_\d+\.txt$")


class Review(NamedTuple):
    """One review, and where it was read."""

    place: str
    label: int
    number: int  # within its class and part
    text: bytes


def read_archive(path: Path) -> dict[str, list[Review]]:
    """The labelled reviews of the archive by part, train and test, in the order of class and number.

    Raises:
        ValueError: it is damaged, or has no reviews of some class.
    """
    reviews: dict[str, list[Review]] = {"train": [], "test": []}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                found = _MEMBER.search(member.name)
                if found is not None and member.isfile():
                    text = archive.extractfile(member).read()
                    place = f"{path}, {member.name}"
                    reviews[found[1]].append(Review(place, CLASSES.index(found[2]), int(found[3]), text))
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: aclImdb_v1.tar.gz, whole") from error
    for part, found in reviews.items():
        found.sort(key=lambda review: (review.label, review.number))
        for label, name in enumerate(CLASSES):
            if sum(review.label == label for review in found) < 1 / _HELD_OUT:
                raise ValueError(f"{path} has too few reviews {part}/{name}; allowed: aclImdb_v1.tar.gz")
    return reviews


def split(reviews: dict[str, list[Review]]) -> dict[str, list[Review]]:
    """Train, valid and test; the last reviews of each class of the training part are those of valid."""
    train: list[Review] = []
    valid: list[Review] = []
    for label in range(len(CLASSES)):
        found = [review for review in reviews["train"] if review.label == label]
        count = len(found) - round(_HELD_OUT * len(found))
        train += found[:count]
        valid += found[count:]
    return {"train": train, "valid": valid, "test": reviews["test"]}


def examples(reviews: list[Review], longest: int) -> Iterator[Example]:
    """The first ``longest`` bytes of each review.

    Raises:
        ValueError: an empty review.
    """
    for review in reviews:
        yield Example((to_tokens(review.text, longest, review.place),), review.label)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.text", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/lra/text"), help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="aclImdb_v1.tar.gz, if you have it")
    parser.add_argument("--max-length", type=positive_int, default=LONGEST, help="bytes of a review (%(default)s)")
    return parser


@script("text")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        write(find_file(options.file, SOURCES["imdb"], out), out, options.max_length)
    return 0


def write(path: Path, out: Path, longest: int) -> None:
    """Write ``out``/data-bin from the archive ``path``."""
    splits = split(read_archive(path))
    total = sum(map(len, splits.values()))
    made = {name: examples(reviews, longest) for name, reviews in splits.items()}
    counts = write_examples(out / "data-bin", made, pixel_dictionary(), len(CLASSES), total)
    for name, count in counts.items():
        print(f"  {name:<5}  {count:6,d} reviews")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")


if __name__ == "__main__":
    sys.exit(main())
