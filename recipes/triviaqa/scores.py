"""Exact match and F1 of answers, computed as in TriviaQA's own evaluation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairseq_plugin.data.span_answers import exact_match, f1_score


class Scores(NamedTuple):
    """Means over all questions, in per cent; a question without an answer counts as 0."""

    em: float
    f1: float
    questions: int
    missing: int  # questions without an answer


def score(answers: Mapping[str, str], gold: Mapping[str, Sequence[str]]) -> Scores:
    """Score ``answers`` against all ``gold`` answers; both are keyed by the name of the question."""
    pairs = [(answers.get(name), gold_answers) for name, gold_answers in gold.items()]
    values = [
        (exact_match(answer, gold_answers), f1_score(answer, gold_answers))
        for answer, gold_answers in pairs
        if answer is not None
    ]
    em, f1 = (100.0 * sum(column) / len(pairs) for column in (zip(*values) if values else ((), ())))
    return Scores(em, f1, len(pairs), len(pairs) - len(values))
