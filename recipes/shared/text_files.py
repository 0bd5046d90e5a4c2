"""Read and write text files line by line, and cut one text into train, valid and test."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .working_folder import atomic_write

#: The parts of a trial text, in order, and their shares.
TRIAL_PARTS = {"train": 0.9, "valid": 0.05, "test": 0.05}


def cut_trial(count: int, what: str) -> dict[str, range]:
    """Split -> the indices of its lines or files out of ``count``, in order.

    Raises:
        ValueError: there are too few; the message begins with ``what``, a text that names their number.
    """
    least = round(1 / min(TRIAL_PARTS.values()))
    if count < least:
        raise ValueError(f"{what}; allowed: at least {least}")
    ends = [round(share * count) for share in itertools.accumulate(TRIAL_PARTS.values())]
    return {split: range(start, end) for split, start, end in zip(TRIAL_PARTS, [0, *ends], ends)}


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file in UTF-8, with their ends."""
    # newline="\n": other line separators of Unicode stay inside their line.
    with open(path, encoding="utf-8", newline="\n") as file:
        yield from file


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write ``lines``, which have their ends, to ``path``; it exists afterwards only if all could be written.

    Raises:
        ValueError: a file exists that this command did not write; see ``atomic_write``.
    """
    with atomic_write(path) as part, open(part, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)


def cut_text(path: Path, targets: dict[str, Path], limit: int | None = None) -> None:
    """Cut the lines of a text file into the files ``targets`` of train, valid and test, in this order.

    Args:
        limit: use at most this many lines, from the first one.

    Raises:
        ValueError: the file is not text in UTF-8 or has too few lines.
    """
    try:
        count = sum(1 for _ in itertools.islice(read_lines(path), limit))
    except UnicodeDecodeError as error:
        raise ValueError(f"--file is {path}, which is not text in UTF-8: {error}; allowed: a text file") from error
    lines = read_lines(path)
    for split, indices in cut_trial(count, f"{path} has {count} lines to use").items():
        write_lines(targets[split], itertools.islice(lines, len(indices)))
