"""The tables of published numbers in the READMEs of the recipes, generated from the papers' tables.

A table stands between ``<!-- published: PAPER TABLE -->`` and ``<!-- end of published -->``; nothing else is changed.
"""

import textwrap
from pathlib import Path

from ..shared.generated_parts import has_part, rewrite_files
from ..shared.generated_parts import rewritten as rewritten_parts
from .entries import entries_of
from .measured import Measured, measured, published_cells, run_here, said_of_order
from .small import small_command
from .tables import PublishedTable, read_paper
from .trainings import here

RECIPES = Path(__file__).parents[1]
_COMMAND = "recipes.papers"


def readmes() -> list[Path]:
    """The READMEs that have such tables."""
    return [path for path in sorted(RECIPES.glob("*/README.md")) if has_part(path, "published")]


def rewritten(text: str) -> str:
    """``text`` of a README with its tables generated again.

    Raises:
        ValueError: a marker names a paper or table that does not exist.
    """

    def make(paper: str, number: str) -> str:
        tables = read_paper(paper).tables
        if number not in tables:
            raise ValueError(f"a marker names Table {number} of {paper}; allowed: {', '.join(tables)}")
        return f"\n\n{document(paper, tables[number])}\n\n"

    return rewritten_parts(text, "published", make)


def document(paper: str, table: PublishedTable) -> str:
    """A table as printed, with the models that train its rows, our measurements, and the source of the table."""
    entries, measurements = entries_of(paper)[table.number], measured(paper, table.number)
    columns = bool(set(entries) & set(table.header[1:]))  # models are columns
    names = table.header[1:] if columns else [row.name for row in table.rows]
    added = {"here": [here(entries[name]) for name in names]}
    missing = {name: run_here(name, entries[name], []) for name in names}
    for title, comparison in zip(_titles(measurements), measurements):
        added[title] = [comparison.cells.get(name, missing[name]) for name in names]
    text = table.markdown(last=added if columns else {}, further={} if columns else added)
    label = f"Table {table.number}" if table.number.isalnum() else f"the table {table.number.replace('-', ' ')}"
    source = (
        f"As printed, {label} of the {read_paper(paper).title} paper: `python -m {_COMMAND} {paper} {table.number}`."
    )
    small = small_command(paper, table.number)
    source += f" All rows in one comparison: `{small}`." if small else ""
    return "\n\n".join([text, _filled(source), *_paragraphs(table, measurements)])


def _titles(found: list[Measured]) -> list[str]:
    """A column's header for each comparison: its size, with a number if there are several of that size."""
    sizes = [comparison.size for comparison in found]
    return [
        size if sizes.count(size) == 1 else f"{size} ({sizes[: i + 1].count(size)})" for i, size in enumerate(sizes)
    ]


def _paragraphs(table: PublishedTable, measurements: list[Measured]) -> list[str]:
    """Paragraphs on the columns of measurements, with commands and dates; limits stand once for all that share them."""
    by_limits: dict[str, list[str]] = {}
    for title, comparison in zip(_titles(measurements), measurements):
        column = comparison.column
        order = said_of_order(comparison.cells, published_cells(table, column, list(comparison.cells), comparison.part))
        by_limits.setdefault(comparison.limits, []).append(
            f"{title[0].upper()}{title[1:]}, compared with {column}: {comparison.what}. {order} "
            f"`{comparison.command}`; {comparison.machine}, {comparison.date}."
        )
    return [
        paragraph
        for limits, said in by_limits.items()
        for paragraph in ("\n".join(_filled(f"* {line}", subsequent_indent="  ") for line in said), _filled(limits))
    ]


def _filled(text: str, subsequent_indent: str = "") -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False, subsequent_indent=subsequent_indent)


def write_readmes() -> list[Path]:
    """Generate the tables of all READMEs again; returns the files that changed."""
    return rewrite_files(readmes(), lambda path: rewritten(path.read_text(encoding="utf-8")), _COMMAND)
