"""Exact match and F1 of the answers to a set of questions, as the data set's own evaluation computes them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairseq_plugin.data.span_answers import exact_match, f1_score


class Scores(NamedTuple):
    """Means over all questions, in per cent; a question without an answer has 0."""

    em: float
    f1: float
    questions: int
    missing: int  # questions without an answer


def score(answers: Mapping[str, str], gold: Mapping[str, Sequence[str]]) -> Scores:
    """The scores of ``answers`` to the questions that have ``gold`` answers; both are by the names of questions."""
    given = [(answers.get(name), wanted) for name, wanted in gold.items()]
    found = [(exact_match(text, wanted), f1_score(text, wanted)) for text, wanted in given if text is not None]
    em, f1 = (100.0 * sum(column) / len(given) for column in (zip(*found) if found else ((), ())))
    return Scores(em, f1, len(given), len(given) - len(found))
