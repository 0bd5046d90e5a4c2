"""Texts to learn from, and pairs of texts that belong together, from a file of text."""

from pathlib import Path
from typing import NamedTuple

from ..shared.text_files import cut_trial, read_lines

#: The words that the two halves of a text have at least.
_WORDS = 8
#: The most pairs that are used.
_PAIRS = 200


class Texts(NamedTuple):
    """The parts of a text."""

    train: list[str]
    pairs: list[tuple[str, str]]


def read_texts(path: Path, pairs: Path | None = None) -> Texts:
    """The paragraphs of a file; of the last tenth, the two halves of each are pairs, unless a file has ``pairs``.

    A paragraph ends with an empty line; without empty lines, each line is one. Earlier ones that are the same as one of
    the last tenth, a text of a pair or both together are left out.

    Raises:
        ValueError: a file is missing or no text, has too little, or a line of ``pairs`` is no pair.
    """
    texts = _paragraphs(_lines(path, "--file"))
    train = cut_trial(len(texts), f"--file is {path}, with {len(texts)} paragraphs")["train"]
    found = _halves(texts[train.stop :]) if pairs is None else _read_pairs(pairs)
    if len(found) < 2:
        raise ValueError(
            f"--file is {path}, whose last tenth has {len(found)} paragraphs of at least {_WORDS} words; allowed: at "
            "least 2, or --pairs FILE"
        )
    held_out = {*texts[train.stop :], *(text for pair in found for text in (*pair, " ".join(pair)))}
    learned = [text for text in texts[: train.stop] if text not in held_out]
    if not learned:
        raise ValueError(f"--file is {path}, all of which stands in the pairs or its last tenth; allowed: other texts")
    return Texts(learned, found[:_PAIRS])


def _lines(path: Path, option: str) -> list[str]:
    try:
        return [line.strip() for line in read_lines(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} is {path}, which cannot be read: {error}; allowed: a text file in UTF-8") from error


def _paragraphs(lines: list[str]) -> list[str]:
    if "" not in lines[:-1]:
        return [line for line in lines if line]
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def _halves(texts: list[str]) -> list[tuple[str, str]]:
    split = [words for words in (text.split() for text in texts) if len(words) >= _WORDS]
    return [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in split]


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(_lines(path, "--pairs"), 1):
        texts = [text.strip() for text in line.split("\t")]
        if len(texts) != 2 or not all(texts):
            raise ValueError(f"--pairs is {path}, whose line {number} has {len(texts)} texts; allowed: 2, and a tab")
        pairs.append((texts[0], texts[1]))
    if len(pairs) < 2:
        raise ValueError(f"--pairs is {path}, with {len(pairs)} pairs; allowed: at least 2")
    return pairs
