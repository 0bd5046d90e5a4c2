"""Compare training from stock softmax weights with training from random weights, on data that every machine has.

``python -m recipes.pretrained.compare [--file any.txt]`` from the checkout's root: about ten minutes on 2 CPU cores.
Language models through fairseq-train, image models through timm's parts.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common.command_parser import CommandParser

from ..demo import corpus
from ..flash.prepare import WRITER
from ..shared.commands import shown_path
from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import describe_run
from ..shared.working_folder import working_folder, write_text
from .images import DIGITS, compare_images
from .results import COMMAND, write
from .text import SOURCE, compare_text


class Budget(NamedTuple):
    """How long each model trains, and its vocabulary."""

    source_updates: int  # of the stock language model
    updates: int  # of ours, from either start
    vocabulary: int
    source_epochs: int  # of the stock image model
    epochs: int


FULL = Budget(source_updates=300, updates=200, vocabulary=2000, source_epochs=16, epochs=9)
#: To see that everything runs; nothing is learned.
QUICK = Budget(source_updates=5, updates=5, vocabulary=2000, source_epochs=1, epochs=1)
#: Bytes of Python's standard library that are the text without ``--file``.
_LIBRARY_BYTES = 1_200_000


def library_text(path: Path) -> Path:
    """The interpreter's own standard library as one text file at ``path``."""
    documents = corpus.split_by_file(corpus.read_library(), {"text": _LIBRARY_BYTES})["text"]
    write_text(path, "".join(document.text for document in documents))
    return path


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.pretrained.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="any text in UTF-8; default: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("work/pretrained"), help="default: %(default)s")
    parser.add_argument("--vocabulary", type=positive_int, help=f"subwords; default: {FULL.vocabulary}")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


@script("compare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    budget, out = QUICK if options.quick else FULL, options.out.absolute()
    command = command_line(COMMAND, arguments)
    started = time.monotonic()
    if options.file is not None and not options.file.is_file():
        raise ValueError(f"--file is {options.file}, which is no file; allowed: a text file")
    whole = {f"images/{DIGITS}": COMMAND, f"text/{SOURCE}": COMMAND, "text/data-bin": WRITER}
    with working_folder(out, COMMAND, whole=whole):
        return _compare(options, budget, out, command, started)


def _compare(options: argparse.Namespace, budget: Budget, out: Path, command: str, started: float) -> int:
    text = options.file or library_text(out / "library.txt")
    vocabulary = options.vocabulary or budget.vocabulary
    halves = [
        compare_text(out / "text", text, budget.source_updates, budget.updates, vocabulary),
        compare_images(out / "images", budget.source_epochs, budget.epochs),
    ]
    print("\n" + write(out, halves, describe_run(command, time.monotonic() - started)))
    print(f"\nThe same as Markdown and JSON: {shown_path(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
