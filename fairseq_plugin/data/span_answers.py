"""Answers as texts: the texts of subwords, and the exact match and F1 of TriviaQA (Joshi et al., ACL 2017).

Both are computed as in the dataset's own evaluation, version 1.0: on normalised texts, for the best of a question's
gold answers.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: Characters that count as space between the words of an answer.
PUNCTUATION = string.punctuation + "‘’´`"
_SPACES = str.maketrans(dict.fromkeys(PUNCTUATION, " "))
#: A byte for which a sentencepiece model has no subword, such as ``<0xE2>``.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


def normalise_answer(text: str) -> str:
    """``text`` in lower case without punctuation, quotes, underscores and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SPACES)).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 if the normalised ``answer`` is among the normalised ``gold``, else 0.0."""
    return float(normalise_answer(answer) in map(normalise_answer, gold))


def f1_score(answer: str, gold: Sequence[str]) -> float:
    """The largest F1 between the normalised words of ``answer`` and of each of ``gold``, counting repeated words.

    0.0 if ``gold`` is empty or no words are shared.
    """
    words = Counter(normalise_answer(answer).split())
    return max((_f1(words, Counter(normalise_answer(text).split())) for text in gold), default=0.0)


def _f1(words: Counter, wanted: Counter) -> float:
    common = (words & wanted).total()
    return 2.0 * common / (words.total() + wanted.total()) if common else 0.0


def spell(subwords: Sequence[str]) -> list[str]:
    """The text of each of the ``subwords`` of a sentencepiece model, with spaces.

    The bytes of one character are several subwords: the first of a run of bytes gets its whole text, the others "".
    """
    texts = [subword.replace(_SPACE, " ") for subword in subwords]
    bytes_at = [_BYTE.fullmatch(subword) for subword in subwords]
    start = 0
    while start < len(texts):
        end = start
        while end < len(texts) and bytes_at[end]:
            end += 1
        if end > start:
            run = bytes(int(match[1], 16) for match in bytes_at[start:end])
            texts[start:end] = [run.decode("utf-8", errors="replace"), *[""] * (end - start - 1)]
        start = end + 1
    return texts


def best_of_each(questions: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The index of the highest score of each distinct number in ``questions`` (N,); of equal scores, the first.

    The indices are in the order of the questions' numbers. O(N log N).
    """
    order = np.lexsort((-scores, questions))  # stable
    first = np.flatnonzero(np.diff(questions[order], prepend=-1))
    return order[first]
