"""Write Text, reviews of IMDb as bytes: ``python -m recipes.lra.text`` from the checkout's root.

There are 25,000 reviews for training and 25,000 for the test. The last tenth of each class of the training reviews is
held out for validation (the Arena validates on the test split). ``--file`` uses an archive that you already have.
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
    """One review, and the place it was read from."""

    place: str
    label: int
    number: int  # within its class and split
    text: bytes


def read_archive(path: Path) -> dict[str, list[Review]]:
    """Read the labelled reviews of the archive: "train" and "test" -> reviews, ordered by class and number.

    Raises:
        ValueError: the archive is damaged, or has too few reviews of a class.
    """
    reviews: dict[str, list[Review]] = {"train": [], "test": []}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                found = _MEMBER.search(member.name)
                if found is not None and member.isfile():
                    text = archive.extractfile(member).read()
                    location = f"{path}, {member.name}"
                    reviews[found[1]].append(Review(location, CLASSES.index(found[2]), int(found[3]), text))
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: aclImdb_v1.tar.gz, whole") from error
    for part, found in reviews.items():
        found.sort(key=lambda review: (review.label, review.number))
        for label, name in enumerate(CLASSES):
            if sum(review.label == label for review in found) < 1 / _HELD_OUT:
                raise ValueError(f"{path} has too few reviews {part}/{name}; allowed: aclImdb_v1.tar.gz")
    return reviews


def split(reviews: dict[str, list[Review]]) -> dict[str, list[Review]]:
    """Split into train, valid and test; valid gets the last training reviews of each class."""
    train: list[Review] = []
    valid: list[Review] = []
    for label in range(len(CLASSES)):
        class_reviews = [review for review in reviews["train"] if review.label == label]
        count = len(class_reviews) - round(_HELD_OUT * len(class_reviews))
        train += class_reviews[:count]
        valid += class_reviews[count:]
    return {"train": train, "valid": valid, "test": reviews["test"]}


def examples(reviews: list[Review], longest: int) -> Iterator[Example]:
    """Yield the first ``longest`` bytes of each review.

    Raises:
        ValueError: a review is empty.
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
    examples_of_splits = {name: examples(reviews, longest) for name, reviews in splits.items()}
    counts = write_examples(out / "data-bin", examples_of_splits, pixel_dictionary(), len(CLASSES), total)
    for name, count in counts.items():
        print(f"  {name:<5}  {count:6,d} reviews")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")


if __name__ == "__main__":
    sys.exit(main())
