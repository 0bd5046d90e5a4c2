"""Needles in a text: a marker and a symbol after it, which the same marker asks for again later.

The marker is the rarest symbol of the text, and the symbol after it is drawn from the next rarest.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from ..positions import read_stream
from ..texts import write_split

#: Symbols of a needle after its marker, tokens of a needle, and how many symbols are drawn from, if there are so many.
ANSWER, SIZE, CHOICE = 1, 2, 8


def symbols_of(data: Path) -> np.ndarray:
    """The marker and the symbols that are drawn (1 + ``CHOICE``,), as numbers of a data-bin folder's dictionary."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    counts = [(dictionary.count[i], -i) for i in range(dictionary.nspecial, len(dictionary)) if dictionary.count[i]]
    rarest = [-i for _, i in sorted(counts)]
    if len(rarest) < 3:
        raise SystemExit(f"the text has {len(rarest)} different symbols; allowed for needles: at least 3")
    return np.array(rarest[: 1 + CHOICE])


def needle_of(symbols: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A needle (``SIZE``,)."""
    return np.append(symbols[0], generator.choice(symbols[1:], ANSWER))


def mixed(text: np.ndarray, length: int, copies: int, symbols: np.ndarray) -> Iterator[np.ndarray]:
    """Yield ``text`` (n,) in sequences (``length``,), each with ``copies`` of a needle of its own at random places.

    What follows the marker of the second copy is known from the first. An incomplete sequence at the end is left out.
    """
    generator = np.random.default_rng(1)
    room = length - copies * SIZE
    for start in range(0, len(text) - room + 1, room):
        places = np.sort(generator.integers(room + 1, size=copies))
        needles = np.tile(needle_of(symbols, generator), copies)
        yield np.insert(text[start : start + room], np.repeat(places, SIZE), needles)


def write_mixed(data: Path, folder: Path, length: int, copies: int) -> None:
    """Write the train split of the folder ``data`` with needles to ``folder``, unless it is there; see ``mixed``."""
    if (folder / "dict.txt").exists():  # written last
        return
    text, dictionary = read_stream(data, "train").numpy()[1:], (data / "dict.txt").read_bytes()
    symbols = len(Dictionary.load(str(data / "dict.txt")))
    write_split(folder, "train", mixed(text, length, copies, symbols_of(data)), symbols)
    (folder / "dict.txt").write_bytes(dictionary)


def distances(length: int) -> list[int]:
    """How many tokens before the question a needle is looked for: even steps, two shorter ones, and the longest."""
    longest = length - ANSWER
    eighths = [i * length // 8 for i in range(1, 8)]
    return sorted({x for x in (length // 32, length // 16, *eighths, longest) if SIZE <= x <= longest})


def questions(text: Tensor, length: int, distance: int, count: int, symbols: np.ndarray) -> Tensor:
    """``count`` sequences (count, ``length`` + 1) of ``text`` (n,) whose end asks for a needle ``distance`` before.

    The last ``ANSWER`` tokens are the answer. The needles of all distances are the same, and so is the text.
    """
    generator = np.random.default_rng(0)
    room = length + 1 - 2 * SIZE
    place = length + 1 - SIZE - distance
    rows = []
    for start in generator.integers(len(text) - room + 1, size=count):
        needle = needle_of(symbols, generator)
        row = np.insert(text[start : start + room].numpy(), np.repeat(place, SIZE), needle)
        rows.append(np.concatenate([row, needle]))
    return torch.from_numpy(np.stack(rows))
