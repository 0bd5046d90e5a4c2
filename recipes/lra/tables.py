"""Read and write the Long Range Arena's tables: a header, and one line with Source and Target per sequence."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..shared.text_files import read_lines, write_lines

HEADER = "Source\tTarget\n"


class Row(NamedTuple):
    """One example of a table, and its place for error messages."""

    place: str  # file and line
    source: str
    target: str


def write_table(path: Path, rows: Iterable[str]) -> None:
    """Write rows "source TAB target NEWLINE" below the header; the file is created only if all rows were written."""
    write_lines(path, _with_header(rows))


def _with_header(rows: Iterable[str]) -> Iterator[str]:
    yield HEADER
    yield from rows


def read_table(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, in order.

    Raises:
        ValueError: the file does not exist, its header is wrong, a line has an empty Source, or see ``read_cells``.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; allowed: a table with the columns Source and Target")
    number = 0
    for number, (location, cells) in enumerate(read_cells(path), 1):
        if number == 1:
            if cells != HEADER.split():
                raise ValueError(f"{location} is {cells}; allowed: the header, Source and Target")
            continue
        if len(cells) != 2:
            raise ValueError(f"{location} has {len(cells)} columns; allowed: 2, Source and Target")
        if not cells[0].strip():
            raise ValueError(f"{location} has an empty Source; allowed: at least one symbol")
        yield Row(location, *cells)
    if number < 2:
        raise ValueError(f"{path} has {number} lines; allowed: the header and at least one example")


def read_cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place, for error messages, and the cells of each line of a file.

    Raises:
        ValueError: a line is cut off or not UTF-8; the message names the line.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(path), 1):
            location = f"{path}, line {number}"
            if not line.endswith("\n"):
                raise ValueError(f"{location} is cut off; allowed: a line that ends")
            yield location, line.rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}, is not text in UTF-8: {error}; allowed: a table") from error
