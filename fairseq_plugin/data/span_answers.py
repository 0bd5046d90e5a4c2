"""Answers as texts: what subwords say, and the exact match and F1 of TriviaQA (Joshi et al., ACL 2017).

Both are computed as the data set's own evaluation does, version 1.0: on normalised texts, and for the best of a
question's gold answers.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: What counts as space between the words of an answer.
PUNCTUATION = string.punctuation + "‘’´`"
_SPACES = str.maketrans(dict.fromkeys(PUNCTUATION, " "))
#: A byte that a sentencepiece model has no subword for, as ``<0xE2>``.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


def normalise_answer(text: str) -> str:
    """``text`` in small letters, without punctuation, quotes, underscores and articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SPACES)).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 if ``answer`` is one of ``gold`` once both are normalised, else 0.0; 0.0 where there is no gold."""
    return float(normalise_answer(answer) in map(normalise_answer, gold))


def f1_score(answer: str, gold: Sequence[str]) -> float:
    """The largest F1 of the words of ``answer`` and of one of ``gold``, normalised, each word as often as it is there.

    0.0 where there is no gold, or no word in common.
    """
    words = Counter(normalise_answer(answer).split())
    return max((_f1(words, Counter(normalise_answer(text).split())) for text in gold), default=0.0)


def _f1(words: Counter, wanted: Counter) -> float:
    common = (words & wanted).total()
    return 2.0 * common / (words.total() + wanted.total()) if common else 0.0


def spell(subwords: Sequence[str]) -> list[str]:
    """The text that each of ``subwords`` of a sentencepiece model stands for, a space as a space.

    The bytes of one character are several subwords: the first of a run of them has all of its text, the others none.
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
    """For each of the different numbers in ``questions`` (N,) the place of its highest score, the first of equal ones.

    The places are in the order of the questions' numbers. O(N log N).
    """
    order = np.lexsort((-scores, questions))  # stable
    first = np.flatnonzero(np.diff(questions[order], prepend=-1))
    return order[first]
