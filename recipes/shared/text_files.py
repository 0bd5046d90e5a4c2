"""Read and write text files line by line, and cut one text into train, valid and test."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .working_folder import own_file

#: The parts into which a text for a trial is cut, in order.
TRIAL_PARTS = {"train": 0.9, "valid": 0.05, "test": 0.05}


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file in UTF-8, with their ends."""
    # newline="\n": other line separators of Unicode stay inside their line.
    with open(path, encoding="utf-8", newline="\n") as file:
        yield from file


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write ``lines``, which have their ends, to ``path``; it exists afterwards only if all could be written.

    Raises:
        ValueError: there is a file that is not of this command; see ``own_file``.
    """
    with own_file(path) as part, open(part, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)


def cut_text(path: Path, targets: dict[str, Path], limit: int | None = None) -> None:
    """Cut a text file by lines into the files ``targets`` of train, valid and test, in this order.

    Args:
        limit: use only the first so many lines.

    Raises:
        ValueError: it is not text in UTF-8 or has too few lines.
    """
    try:
        count = sum(1 for _ in itertools.islice(read_lines(path), limit))
    except UnicodeDecodeError as error:
        raise ValueError(f"--file is {path}, which is not text in UTF-8: {error}; allowed: a text file") from error
    least = round(1 / min(TRIAL_PARTS.values()))
    if count < least:
        raise ValueError(f"{path} has {count} lines to use; allowed: at least {least}")
    lines = read_lines(path)
    start, share = 0, 0.0
    for split, size in TRIAL_PARTS.items():
        share += size
        end = round(share * count)
        write_lines(targets[split], itertools.islice(lines, end - start))
        start = end
