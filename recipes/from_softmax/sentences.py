"""Texts to learn from, and pairs of texts that belong together, from a file of text."""

from pathlib import Path

from ..texts import cut, read_lines

#: The words that the two halves of a text have at least, and the most pairs that are used.
_WORDS, _PAIRS = 8, 200


def read_texts(path: Path, pairs: Path | None = None) -> tuple[list[str], list[tuple[str, str]]]:
    """The paragraphs of a file, and pairs: halves of those of the last tenth, unless a file has ``pairs``.

    A paragraph ends with an empty line; without empty lines, each line is one. Earlier ones that are the same as one of
    the last tenth, a text of a pair or both together are left out.

    Raises:
        SystemExit: a file has too little, or a line of ``pairs`` is no pair.
    """
    texts = _paragraphs([line.strip() for line in read_lines(path)])
    end = cut(len(texts), f"the paragraphs of {path}")["train"].stop
    found = [_halves(text) for text in texts[end:] if len(text.split()) >= _WORDS]
    found = found if pairs is None else _read_pairs(pairs)
    held_out = {*texts[end:], *(text for pair in found for text in (*pair, " ".join(pair)))}
    learned = [text for text in texts[:end] if text not in held_out]
    if len(found) < 2 or not learned:
        raise SystemExit(
            f"--file is {path}, with {len(learned)} paragraphs to learn from and {len(found)} pairs; allowed: at least "
            f"1 and 2; a paragraph of the last tenth is a pair if it has {_WORDS} words"
        )
    return learned, found[:_PAIRS]


def _paragraphs(lines: list[str]) -> list[str]:
    separator = "\n\n" if "" in lines[:-1] else "\n"
    texts = (block.replace("\n", " ").strip() for block in "\n".join(lines).split(separator))
    return [text for text in texts if text]


def _halves(text: str) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    pairs = [tuple(text.strip() for text in line.split("\t")) for line in read_lines(path)]
    for number, texts in enumerate(pairs, 1):
        if len(texts) != 2 or not all(texts):
            raise SystemExit(f"--pairs is {path}, whose line {number} has {len(texts)} texts; allowed: 2, and a tab")
    return pairs
