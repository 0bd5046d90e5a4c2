"""One example of long copy: a piece of text with marked passages, and these passages in order."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

#: Prefix of the symbols of marked characters. No symbol of a text begins with it.
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
    """Numbers for the symbols of a text, plain and marked, from one dictionary for source and target."""

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
        """The numbers of the same symbols when marked."""
        return numbers + (self.marked_from - self.dictionary.nspecial)


def draw(text: np.ndarray, layout: Layout, symbols: Symbols, generator: np.random.Generator) -> Example:
    """An example from a random place in ``text`` (T,), the numbers of at least ``layout.source_tokens`` symbols.

    The source is cut into as many equal parts as it has passages; each part has one passage, at a random place.
    """
    start = generator.integers(len(text) - layout.source_tokens + 1)
    stretch = text[start : start + layout.source_tokens]
    part = layout.source_tokens // layout.spans
    begins = np.arange(layout.spans) * part + generator.integers(part - layout.span_tokens + 1, size=layout.spans)
    places = (begins[:, None] + np.arange(layout.span_tokens)).flatten()
    source = stretch.copy()
    source[places] = symbols.marked(stretch[places])
    return Example(source, stretch[places])
