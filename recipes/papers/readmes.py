"""The tables of published numbers in the READMEs of the recipes, made of the papers' tables.

A table stands between ``<!-- published: PAPER TABLE -->`` and ``<!-- end of published -->``; nothing else is touched.
"""

import re
from pathlib import Path

from common.output_files import unfinished

from .entries import Entries, entries_of
from .tables import PublishedTable, read_paper
from .trainings import here

_RECIPES = Path(__file__).parents[1]
_COMMAND = "recipes.papers"
_MARKED = re.compile(r"(<!-- published: (\S+) (\S+) -->\n)(.*?)(<!-- end of published -->)", re.DOTALL)


def readmes() -> list[Path]:
    """The READMEs that have such tables."""
    return [path for path in sorted(_RECIPES.glob("*/README.md")) if _MARKED.search(path.read_text(encoding="utf-8"))]


def rewritten(text: str) -> str:
    """``text`` of a README with its tables made anew.

    Raises:
        ValueError: a marker names a paper or table that is not there.
    """

    def made(found: re.Match) -> str:
        begin, paper, number, _, end = found.groups()
        tables = read_paper(paper).tables
        if number not in tables:
            raise ValueError(f"a marker names Table {number} of {paper}; allowed: {', '.join(tables)}")
        return f"{begin}\n{document(paper, tables[number])}\n\n{end}"

    return _MARKED.sub(made, text)


def document(paper: str, table: PublishedTable) -> str:
    """A table as printed, what trains each row here, and where it is from."""
    entries = entries_of(paper)[table.number]
    if set(entries) & set(table.header[1:]):  # models are columns
        text = table.markdown(last={"here": [_cell(entries, name) for name in table.header[1:]]}, further={})
    else:
        text = table.markdown(last={}, further={"here": [_cell(entries, row.name) for row in table.rows]})
    place = f"Table {table.number}" if table.number.isalnum() else f"the table {table.number.replace('-', ' ')}"
    source = (
        f"As printed, {place} of the {read_paper(paper).title} paper: `python -m {_COMMAND} {paper} {table.number}`"
    )
    return f"{text}\n\n{source}."


def write_readmes() -> list[Path]:
    """Make the tables of all READMEs anew; returns those that changed."""
    changed = []
    for path in readmes():
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            with unfinished(path, _COMMAND) as new:
                new.write_text(after, encoding="utf-8")
                new.replace(path)
            changed.append(path)
    return changed


def _cell(entries: Entries, name: str) -> str:
    return here(entries[name])
