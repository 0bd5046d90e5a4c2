"""Find the gold answers of a question in a document by comparing texts (distant supervision)."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from fairseq_plugin.data.span_answers import PUNCTUATION, normalise_answer, spell

_BETWEEN = rf"[\s{re.escape(PUNCTUATION)}]+"
#: What the official normalisation replaces by one space: whitespace and punctuation, with articles in between.
_GAP = rf"{_BETWEEN}(?:(?:a|an|the){_BETWEEN})*"


def answer_pattern(answers: Iterable[str]) -> re.Pattern | None:
    """A pattern for all texts with the same official normalisation as one of ``answers``, as whole words.

    If two answers match at the same place, the longer one is used. None if no answer has any text.
    """
    texts = {normalise_answer(unicodedata.normalize("NFKC", answer)) for answer in answers}  # NFKC: as sentencepiece
    longest = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    parts = (_GAP.join(map(re.escape, text.split())) for text in longest)
    joined = "|".join(parts)
    return re.compile(rf"(?<!\w)(?:{joined})(?!\w)", re.IGNORECASE) if joined else None


class SpelledDocument:
    """A document as text, with the subword that each character belongs to."""

    def __init__(self, subwords: Sequence[str]) -> None:
        texts = spell(subwords)
        self.text = "".join(texts)
        lengths = np.array([len(text) for text in texts])
        # Subwords without text are the remaining bytes of the character that the subword before begins.
        first = np.flatnonzero(lengths)
        self._first = np.append(first, len(texts))
        self._begin = (np.cumsum(lengths) - lengths)[first]

    def find(self, pattern: re.Pattern | None) -> np.ndarray:
        """First and last subword of each match, (S, 2), int32."""
        matches = pattern.finditer(self.text) if pattern is not None else ()
        ranges = np.array([match.span() for match in matches], dtype=np.int64).reshape(-1, 2)
        first = np.searchsorted(self._begin, ranges[:, 0], side="right") - 1
        last = np.searchsorted(self._begin, ranges[:, 1], side="left")
        return np.stack([self._first[first], self._first[last] - 1], 1).astype(np.int32)
