"""Exact match and F1 of written answers: ``python -m recipes.triviaqa.evaluate ANSWERS --file wikipedia-dev.json``.

By the formulas of TriviaQA's own ``evaluation/triviaqa_evaluation.py``, for files of the verified parts too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_parser import CommandParser

from ..shared.json_files import read_record
from ..shared.scripts import script
from .questions import read_questions
from .scores import score

COMMAND = "recipes.triviaqa.evaluate"


def read_answers(path: Path) -> dict[str, str]:
    """The answers in a file, by the names of questions.

    Raises:
        ValueError: it cannot be read, or holds anything else.
    """
    allowed = "JSON from the names of questions to answers, as recipes.triviaqa.answer --output writes it"
    try:
        return read_record(path, dict[str, str], allowed)
    except ValueError as error:
        raise ValueError(f"ANSWERS is {error}") from error


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="JSON from the names of questions to answers")
    parser.add_argument("--file", type=Path, required=True, help="a file of the data set's qa, as wikipedia-dev.json")
    return parser


@script("evaluate")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    answers = read_answers(options.answers)
    found = score(answers, {asked.name: asked.answers for asked in read_questions(options.file)})
    print(
        f"exact match {found.em:.2f}, F1 {found.f1:.2f}: {found.questions:,d} questions, {found.missing:,d} unanswered"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
