"""Exact match and F1 of written answers: ``python -m recipes.triviaqa.evaluate ANSWERS --file wikipedia-dev.json``.

Uses the formulas of TriviaQA's own ``evaluation/triviaqa_evaluation.py``; files of the verified part can be read, too.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_plugin.data.span_answers import exact_match, f1_score

from .questions import read_questions


class Scores(NamedTuple):
    """Means over all questions, in per cent; a question without an answer counts as 0."""

    em: float
    f1: float
    questions: int
    missing: int  # questions without an answer


def score(answers: Mapping[str, str], gold: Mapping[str, Sequence[str]]) -> Scores:
    """Score ``answers`` against all ``gold`` answers; both are keyed by the name of the question."""
    found = [(answers[name], right) for name, right in gold.items() if name in answers]
    em, f1 = (100.0 * sum(of(*pair) for pair in found) / len(gold) for of in (exact_match, f1_score))
    return Scores(em, f1, len(gold), len(gold) - len(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the answers and print their scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="JSON from the names of questions to answers")
    parser.add_argument("--file", type=Path, required=True, help="a file of the data set's qa, as wikipedia-dev.json")
    options = parser.parse_args(arguments)
    answers = json.loads(options.answers.read_text(encoding="utf-8"))
    if not isinstance(answers, dict) or not all(isinstance(text, str) for text in answers.values()):
        raise SystemExit(f"ANSWERS is {options.answers}; allowed: JSON from the names of questions to answers")
    means = score(answers, {question.name: question.answers for question in read_questions(options.file)})
    print(
        f"exact match {means.em:.2f}, F1 {means.f1:.2f}: {means.questions:,d} questions, {means.missing:,d} unanswered"
    )


if __name__ == "__main__":
    main()
