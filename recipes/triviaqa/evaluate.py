"""Exact match and F1 of written answers: ``python -m recipes.triviaqa.evaluate ANSWERS --file wikipedia-dev.json``.

Uses the formulas of TriviaQA's own ``evaluation/triviaqa_evaluation.py``; files of the verified part can be read, too.
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
    """Read the answers of a file, by name of the question.

    Raises:
        ValueError: the file cannot be read, or does not map names to answers.
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
    means = score(answers, {question.name: question.answers for question in read_questions(options.file)})
    print(
        f"exact match {means.em:.2f}, F1 {means.f1:.2f}: {means.questions:,d} questions, {means.missing:,d} unanswered"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
