"""The published tables and figures, read from ``flowformer.md``, ``flash.md`` and ``daft.md`` next to this file.

Below ``## Table NUMBER: TITLE`` are the rows as printed, paragraphs of notes, and a list of contradictions in the table
or with the text. A figure is an item of the list below ``## Figures``.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent
#: The papers' names on a command line.
PAPERS = ("flowformer", "flash", "daft")
#: A citation in the name of a row or column: parentheses with a year.
_CITATION = re.compile(r"\s*\([^()]*\b(?:19|20)\d\d[a-zA-Z]?\)|\s*\(OURS\)")
_ARROWS = re.compile(r"\s*[↑↓]")


class Row(NamedTuple):
    """One row of a table."""

    name: str  # as printed; made unique in its table where rows have the same name
    cells: tuple[str, ...]  # as printed, including the name


class PublishedTable(NamedTuple):
    """One table of a paper."""

    number: str
    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    contradictions: tuple[str, ...]

    def row(self, name: str) -> Row:
        """The row of exactly this name; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def cell(self, row: str, column: str) -> str:
        """The cell in the row ``row`` and the first column whose header begins with ``column``; KeyError if none.

        A header between "512: PPLX" and "1024: PPLX" has two names: "Latency" and "512: Latency".
        """
        group, matches = "", []
        for i, header in enumerate(self.header):
            group = header.partition(": ")[0] if ": " in header else group
            if i and (header.startswith(column) or f"{group}: {header}".startswith(column)):
                matches.append(i)
        if not matches:
            raise KeyError(column)
        return self.row(row).cells[matches[0]]

    def markdown(self, *, last: dict[str, Sequence[str]], further: dict[str, Sequence[str]]) -> str:
        """The table as Markdown, with ``last`` rows, name -> cells, and ``further`` columns, header -> cells."""
        rows = [*(row.cells for row in self.rows), *((name, *cells) for name, cells in last.items())]
        printed = zip(*(row.cells for row in self.rows))
        aligned = ["---:" if i and any(map(_is_number, column)) else "---" for i, column in enumerate(printed)]
        lines = [(*self.header, *further), (*aligned, *["---"] * len(further))]
        lines += [(*row, *cells) for row, *cells in zip(rows, *further.values())]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Figure(NamedTuple):
    """One figure of a paper."""

    number: str
    caption: str


class Paper(NamedTuple):
    """The tables and figures of a paper."""

    name: str
    title: str
    about: str
    tables: dict[str, PublishedTable]  # by number, in the paper's order
    figures: dict[str, Figure]


@functools.cache
def read_paper(name: str) -> Paper:
    """One of ``PAPERS``.

    Raises:
        ValueError: there is no such paper.
    """
    if name not in PAPERS:
        raise ValueError(f"PAPER is {name}; allowed: {', '.join(PAPERS)}")
    first, *sections = re.split(r"^## ", (_FOLDER / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    title, _, about = first.removeprefix("# ").partition("\n")
    tables = [_table(section) for section in sections if not section.startswith("Figures")]
    listed = next(section for section in sections if section.startswith("Figures"))
    items = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", listed, flags=re.MULTILINE)
    figures = {number: Figure(number, " ".join(caption.split())) for number, caption in items}
    about = " ".join(about.split()).partition(" Its tables")[0]
    return Paper(name, title, about, {table.number: table for table in tables}, figures)


def short(text: str) -> str:
    """A row's or column's name without citations and arrows: "COSFORMER (2022)" is "COSFORMER"."""
    return _ARROWS.sub("", _CITATION.sub("", text)).strip().rstrip(".")


def _table(section: str) -> PublishedTable:
    """The table in ``section``, which begins with "Table NUMBER: TITLE"."""
    heading, _, body = section.partition("\n")
    number, _, title = heading.removeprefix("Table ").partition(": ")
    lines = body.splitlines()
    header, _, *rows = (_cells(line) for line in lines if line.startswith("|"))
    paragraphs = re.split(r"\n(?=\* )|\n\n", "\n".join(line for line in lines if not line.startswith("|")))
    notes = [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]
    return PublishedTable(
        number.lower().replace(" ", "-"),
        title,
        header,
        tuple(Row(*named) for named in zip(_names(header, rows), rows)),
        tuple(note for note in notes if not note.startswith("* ")),
        tuple(note.removeprefix("* ") for note in notes if note.startswith("* ")),
    )


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))


def _names(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A unique name for each row: rows with the same name get the name of their group, or cells that differ, added."""
    names, groups, group = [row[0] for row in rows], [], ""
    for row in rows:
        group = group if any(row[1:]) else row[0]
        groups.append(group)
    for name in {name for name in names if names.count(name) > 1}:
        same = [i for i, other in enumerate(names) if other == name]
        suffixes = [(groups, "")] + [([row[i] for row in rows], f"{short(header[i])} ") for i in range(1, len(header))]
        for cells, prefix in suffixes:
            if len({names[i] for i in same}) < len(same) and len({cells[i] for i in same}) > 1:
                for i in same:
                    names[i] += f", {prefix}{cells[i]}"
    return names


def _is_number(cell: str) -> bool:
    return cell.lstrip("-")[:1].isdigit()


def names_like(entries: Iterable[str], asked: str) -> list[str]:
    """The names equal to ``asked``; else those equal without citations and case; else those with a comma after it."""
    plain = {name: short(name).casefold() for name in entries}
    wanted = short(asked).casefold()
    exact = [name for name in plain if name == asked] or [name for name, text in plain.items() if text == wanted]
    return exact or [name for name, text in plain.items() if text.startswith(f"{wanted},")]
