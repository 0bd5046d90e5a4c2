"""One example of long copy: a stretch of text with marked passages in it, and these passages in order."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

#: In front of the character of a symbol that stands for a marked character. No symbol of a text begins so.
MARK = "<mark>"


class Layout(NamedTuple):
    """The sizes of an example."""

    source_tokens: int
    spans: int  # marked passages of a source
    span_tokens: int  # of each passage

    @property
    def target_tokens(self) -> int:
        """Tokens of a target."""
        return self.spans * self.span_tokens

    def check(self) -> None:
        """Raise ValueError unless the passages fit into a source."""
        if self.source_tokens < self.target_tokens:
            raise ValueError(
                f"--source-tokens is {self.source_tokens}; allowed with --spans {self.spans} and --span-tokens "
                f"{self.span_tokens}: at least {self.target_tokens}"
            )


class Example(NamedTuple):
    """A source (source_tokens,) with its marks, and its target (target_tokens,); without </s>."""

    source: np.ndarray
    target: np.ndarray


class Symbols:
    """The symbols of a text, and each of them marked, as numbers: one dictionary for source and target."""

    def __init__(self, text: Iterable[str]) -> None:
        self.dictionary = Dictionary()
        symbols = sorted(set(text))
        for symbol in [*symbols, *(MARK + symbol for symbol in symbols)]:
            self.dictionary.add_symbol(symbol)
        self.marked_from = self.dictionary.nspecial + len(symbols)

    def numbers(self, tokens: Iterable[str]) -> np.ndarray:
        """The numbers of symbols."""
        return np.array([self.dictionary.index(token) for token in tokens], dtype=np.int64)

    def marked(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers of the same symbols, marked."""
        return numbers + (self.marked_from - self.dictionary.nspecial)


def draw(text: np.ndarray, layout: Layout, symbols: Symbols, generator: np.random.Generator) -> Example:
    """An example from anywhere in ``text`` (T,), the numbers of at least ``layout.source_tokens`` symbols.

    The source is cut into as many equal parts as it has passages, and one passage is anywhere in each part.
    """
    start = generator.integers(len(text) - layout.source_tokens + 1)
    stretch = text[start : start + layout.source_tokens]
    part = layout.source_tokens // layout.spans
    begins = np.arange(layout.spans) * part + generator.integers(part - layout.span_tokens + 1, size=layout.spans)
    places = (begins[:, None] + np.arange(layout.span_tokens)).flatten()
    source = stretch.copy()
    source[places] = symbols.marked(stretch[places])
    return Example(source, stretch[places])
