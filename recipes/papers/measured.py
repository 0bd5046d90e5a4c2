"""Our measurements of the tables' rows: small experiments, each with its command, machine and date."""

import re
from pathlib import Path
from typing import NamedTuple

from ..shared.json_files import read_json, read_record
from ..shared.tables import spread
from .tables import PublishedTable, read_paper, short
from .trainings import Entry, trainings_of

_RECIPES = Path(__file__).parents[1]
#: "PAPER TABLE" -> the fields of each ``Measured``.
_KEPT = Path(__file__).with_name("measured.json")
#: The cell of a row that was run here; no row was run at the paper's size.
IN_SMALL = "in small"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Measured(NamedTuple):
    """One comparison whose models are rows, or columns, of a published table."""

    what: str  # size and data
    cells: dict[str, str]  # by the name of a row, or the header of a column of models
    column: str  # of the table, that it is compared with; the row, if columns are models
    command: str
    machine: str
    date: str
    limits: str  # what the comparison does not show
    higher_is_better: bool = True
    part: int = 0  # index into a published cell with several numbers, as in "16.78 / 4.23"


def measured(paper: str, number: str) -> list[Measured]:
    """Our measurements for a table."""
    measurements = read_record(_KEPT, dict[str, list[Measured]]).get(f"{paper} {number}", [])
    return [*measurements, _vowels()] if (paper, number) == ("flowformer", "6") else measurements


def _vowels() -> Measured:
    """JapaneseVowels, from the file that its comparison wrote."""
    content = read_json(_RECIPES / "time_series" / "japanese_vowels.json", results=list, earlier=list)
    columns = {short(header): header for header in read_paper("flowformer").tables["6"].header[1:]}
    names = {
        "softmax": "TRANS",
        "linear": "LINEAR",
        "reformer": "RE",
        "longformer": "LONG",
        "favor": "PER",
        "yoso": "YOSO-E",
        "cosformer": "COS",
        "flowformer": "FLOW",
    }
    cells = {}
    for name, column in names.items():
        best = [result["best"] for result in content["results"] if result["model"] == name]
        if best:
            cells[columns[column]] = spread(best)
    run = content["earlier"][0]
    title = "JapaneseVowels in the paper's size, 100 epochs; the best test accuracy of a run, as the paper reports"
    limits = "One of ten data sets, that of the shortest series."
    return Measured(title, cells, "JAPANESEVOWELS", run["command"], run["machine"], run["date"], limits)


def published_cells(table: PublishedTable, column: str, names: list[str], part: int = 0) -> dict[str, str]:
    """Published cells of ``names``, rows or columns of models; for ``column`` and ``part`` see ``Measured``."""
    rows = {row.name: row for row in table.rows}
    if column in rows:  # models are columns
        printed = dict(zip(table.header, rows[column].cells))
    else:
        printed = {name: table.cell(name, column) for name in names}
    return {name: printed[name].split(" / ")[part] for name in names}


def value(cell: str) -> float:
    """The number with which a cell begins, without its deviation."""
    return float(_NUMBER.match(cell)[0].replace(",", ""))


def kendall(measured: dict[str, str], published: dict[str, str]) -> float | None:
    """Kendall's tau-b between the order of the cells measured and of those published; None below three rows.

    1 is the same order, -1 the reverse. Deviations are ignored.
    """
    pairs = [(value(published[name]), value(cell)) for name, cell in measured.items()]
    if len(pairs) < 3:
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*pairs)).statistic)


def said_of_order(measured: dict[str, str], published: dict[str, str]) -> str:
    """Kendall's tau in words."""
    tau = kendall(measured, published)
    if tau is None:
        return "Fewer than three rows, so no Kendall's tau."
    return f"Kendall's tau between the orders: {tau:.2f}."


def run_here(name: str, entry: Entry, found: list[Measured]) -> str:
    """Whether the row or column ``name`` was run here; empty where there is nothing to run."""
    if not trainings_of(entry):
        return ""
    return IN_SMALL if any(name in comparison.cells or name == comparison.column for comparison in found) else "not run"
