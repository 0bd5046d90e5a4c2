"""One example of long copy: a stretch of text with marked passages in it, and these passages in order."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

#: Symbols of a source that stand before and behind a marked passage. A character is no such symbol.
BEGIN, END = "<mark>", "</mark>"


class Layout(NamedTuple):
    """The sizes of an example."""

    source_tokens: int  # with the marks
    spans: int  # marked passages of a source
    span_tokens: int  # of each passage

    @property
    def text_tokens(self) -> int:
        """Tokens of a source without the marks."""
        return self.source_tokens - 2 * self.spans

    @property
    def target_tokens(self) -> int:
        """Tokens of a target."""
        return self.spans * self.span_tokens

    def check(self) -> None:
        """Raise ValueError unless the passages fit into a source, with a character between them."""
        least = self.spans * (self.span_tokens + 3) - 1
        if self.source_tokens < least:
            raise ValueError(
                f"--source-tokens is {self.source_tokens}; allowed with --spans {self.spans} and --span-tokens "
                f"{self.span_tokens}: at least {least}"
            )


class Example(NamedTuple):
    """A source (source_tokens,) with its marks, and its target (target_tokens,); without </s>."""

    source: np.ndarray
    target: np.ndarray


class Symbols:
    """The symbols of a text and the marks as numbers: one dictionary for source and target."""

    def __init__(self, text: Iterable[str]) -> None:
        self.dictionary = Dictionary()
        self.begin, self.end = (self.dictionary.add_symbol(mark) for mark in (BEGIN, END))
        for symbol in sorted(set(text)):
            self.dictionary.add_symbol(symbol)

    def numbers(self, tokens: Iterable[str]) -> np.ndarray:
        """The numbers of symbols."""
        return np.array([self.dictionary.index(token) for token in tokens], dtype=np.int64)


def draw(text: np.ndarray, layout: Layout, symbols: Symbols, generator: np.random.Generator) -> Example:
    """An example from anywhere in ``text`` (T,), the numbers of at least ``layout.text_tokens`` symbols."""
    start = generator.integers(len(text) - layout.text_tokens + 1)
    stretch = text[start : start + layout.text_tokens]
    # Where passages would begin if they had no length; no two at one place, so that some text lies between them.
    rest = layout.text_tokens - layout.target_tokens
    places = np.sort(generator.choice(rest + 1, size=layout.spans, replace=False))
    begins = places + np.arange(layout.spans) * layout.span_tokens
    ends = begins + layout.span_tokens
    marks = np.tile([symbols.begin, symbols.end], layout.spans)
    source = np.insert(stretch, np.stack([begins, ends], axis=1).flatten(), marks)
    return Example(source, np.concatenate([stretch[begin:end] for begin, end in zip(begins, ends)]))


def read_marks(source: np.ndarray, symbols: Symbols) -> np.ndarray:
    """What a source asks for: all that stands between its marks, in order."""
    depth = np.cumsum(source == symbols.begin) - np.cumsum(source == symbols.end)
    return source[(depth == 1) & (source != symbols.begin)]
