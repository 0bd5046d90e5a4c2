"""Make the tables and pictures of comparisons in the recipes' Markdown files again from stored records.

``python -m recipes.results`` from the checkout's root writes the changed files; with ``--check`` it only lists them.

A table stands between ``<!-- results: NAME -->`` and ``<!-- end of results -->`` in a Markdown file of an area; the
rest of the file does not change. Its records are lines of JSON in ``records.jsonl`` next to the file:

* ``{"table": NAME, "columns": [FIELD, ...]}`` begins a table; use ``{FIELD: HEADER, ...}`` if headers differ
  from the names of fields. Columns of numbers are aligned right; ``"align": {FIELD: "left"}`` overrides that;
* ``{"table": NAME, FIELD: VALUE, ...}`` is a row. A number is written with commas between thousands, a list of values
  of several seeds as mean ± deviation, a text unchanged, and a missing field as an empty cell.

For a stored results.json of a command, each table has a single line instead:
``{"table": NAME, "experiment": MODULE, "results": FILE}``. The table is the first one that the module's ``EXPERIMENT``
makes from that file, or with ``"number": N`` one of those below it, counted from 1; with all columns or only
``"columns": [HEADER, ...]``, or ``{HEADER: NEW HEADER, ...}``. ``"beside": {"number": N, "columns": ...}`` adds columns
of another table with the same rows. The first column has names that are typed, or with ``"typed": false`` titles.
``"picture": FILE`` is its picture, which has the digest of the records in its metadata.
"""

import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from common.command_parser import CommandParser
from common.files.output_files import unfinished

from .shared.commands import shown_path
from .shared.comparison import Report, Results
from .shared.experiment import Record
from .shared.generated_parts import rewrite_files
from .shared.generated_parts import rewritten as rewritten_parts
from .shared.json_files import read_json
from .shared.scripts import script
from .shared.tables import Table, markdown_table, spread

COMMAND = "recipes.results"
#: The file of an area's records.
RECORDS = "records.jsonl"
_FOLDER = Path(__file__).parent
#: The name of the digest in a picture's metadata.
_DIGEST = "records"


def read_tables(folder: Path) -> dict[str, list[Record]]:
    """Table -> its lines in the records of ``folder``; the first line is its head.

    Raises:
        ValueError: a line is not JSON, names no table, or is a row above the head of its table.
    """
    tables: dict[str, list[Record]] = {}
    path = folder / RECORDS
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            name = record.pop("table")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}; allowed: an object of JSON with a table") from error
        if name not in tables and not {"columns", "results"} & record.keys():
            raise ValueError(f"{path}, line {number}, is a row of {name}; allowed: first the line with its columns")
        tables.setdefault(name, []).append(record)
    return tables


def cell(value: Any) -> str:
    """The text of a value; see the module docstring."""
    if isinstance(value, list):
        return spread(value)
    return value if isinstance(value, str) else f"{value:,}"


def table_of_rows(head: Record, records: Sequence[Record]) -> str:
    """The table of a head with columns, and its rows."""
    columns, align = head["columns"], head.get("align", {})
    if isinstance(columns, list):
        columns = dict(zip(columns, columns))
    rows = [[cell(record[name]) if name in record else "" for name in columns] for record in records]
    return markdown_table(
        list(columns.values()), rows, {list(columns).index(name): side for name, side in align.items()}
    )


def stored_report(head: Record, folder: Path) -> Report:
    """The report of the experiment in a head, made from its stored results."""
    experiment = importlib.import_module(head["experiment"]).EXPERIMENT
    content = read_json(folder / head["results"], plan=dict, results=list, failed=dict)
    names = {field.name for field in fields(experiment.options)}
    options = experiment.options(**{name: value for name, value in content["plan"].items() if name in names})
    facts = {name: value for name, value in content.items() if name not in ("run", "plan", "results", "failed")}
    return experiment.report(options, facts, Results(content["results"], content["failed"]))


def table_of_experiment(head: Record, folder: Path) -> str:
    """The table of a head with an experiment; names that are typed are written as code."""
    tables = stored_report(head, folder).tables
    header, rows = shown_columns(tables, head)
    if "beside" in head:
        more_header, more_rows = shown_columns(tables, head["beside"])
        header, rows = [*header, *more_header], [[*row, *more] for row, more in zip(rows, more_rows, strict=True)]
    if head.get("typed", True):
        rows = [[f"`{name}`", *cells] for name, *cells in rows]
    return markdown_table(header, rows)


def shown_columns(tables: Sequence[Table], head: Record) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a table of an experiment, with the columns that are shown."""
    table = tables[head.get("number", 0)]
    columns = head.get("columns", table.header)
    if not isinstance(columns, dict):
        columns = dict(zip(columns, columns))
    places = [table.header.index(name) for name in columns]
    return list(columns.values()), [[row[place] for place in places] for row in table.rows]


def rewritten(path: Path) -> str:
    """The text of a Markdown file with its tables made again.

    Raises:
        ValueError: a marker names a table that has no records.
    """
    tables = read_tables(path.parent)

    def make(name: str) -> str:
        if name not in tables:
            raise ValueError(f"{path} has a table {name}; allowed: {', '.join(tables)}, of which {RECORDS} has records")
        head, *records = tables[name]
        table = table_of_rows(head, records) if "results" not in head else table_of_experiment(head, path.parent)
        return f"\n\n{table}\n\n"

    return rewritten_parts(path.read_text(encoding="utf-8"), "results", make)


def folders(folder: Path = _FOLDER) -> list[Path]:
    """The areas in ``folder`` that have records."""
    return [records.parent for records in sorted(folder.glob(f"*/{RECORDS}"))]


def documents(folder: Path = _FOLDER) -> Iterator[Path]:
    """The Markdown files that may have tables."""
    for area in folders(folder):
        yield from sorted(area.glob("*.md"))


def pictures(folder: Path = _FOLDER) -> Iterator[tuple[Path, Record]]:
    """Every picture that is made from stored results, and the head of its table."""
    for area in folders(folder):
        for head, *_ in read_tables(area).values():
            if "picture" in head:
                yield area / head["picture"], head


def digest(head: Record, folder: Path) -> str:
    """The digest of the results that a picture is made from."""
    return hashlib.sha256((folder / head["results"]).read_bytes()).hexdigest()


def is_of(picture: Path, expected: str) -> bool:
    """Whether a picture was made from the results with the digest ``expected``."""
    if not picture.exists():
        return False
    with Image.open(picture) as image:
        return image.info.get(_DIGEST) == expected


def draw(picture: Path, head: Mapping[str, Any]) -> None:
    """Write a picture from stored results."""
    report = stored_report(head, picture.parent)
    information = PngImagePlugin.PngInfo()
    information.add_text(_DIGEST, digest(head, picture.parent))
    with tempfile.TemporaryDirectory() as folder:
        report.draw(Path(folder) / picture.name)
        with Image.open(Path(folder) / picture.name) as image, unfinished(picture, COMMAND) as new:
            image.save(new, format="PNG", pnginfo=information)
            new.replace(picture)


def changed(write: bool, folder: Path = _FOLDER) -> list[Path]:
    """The files that differ from what their records make; they are written if ``write``."""
    paths = rewrite_files(documents(folder), rewritten, COMMAND, write)
    for picture, head in pictures(folder):
        if not is_of(picture, digest(head, picture.parent)):
            paths.append(picture)
            if write:
                draw(picture, head)
    return paths


@script("results")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status, 1 with ``--check`` if a file differs."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file would change")
    options = parser.parse_args(arguments)
    paths = changed(write=not options.check)
    for path in paths:
        print(f"{shown_path(path)} {'is not what its records make' if options.check else 'is made anew'}")
    return int(options.check and bool(paths))


if __name__ == "__main__":
    sys.exit(main())
