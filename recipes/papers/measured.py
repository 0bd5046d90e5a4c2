"""Our measurements of the tables' rows: small experiments, each with its command, machine and date."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..shared.json_files import read_json, read_record
from ..shared.tables import counted, spread
from .tables import PublishedTable, read_paper, short
from .trainings import Entry, NotTrained

_RECIPES = Path(__file__).parents[1]
#: "PAPER TABLE" -> the fields of each ``Measured``.
_KEPT = Path(__file__).with_name("measured.json")
#: How a row was run here.
IN_SMALL, FULL_SIZE = "in small", "at the paper's size"
_VOWELS, _OTHER_VOWELS = (
    f"JapaneseVowels alone, {FULL_SIZE}",
    "JapaneseVowels alone, with a method of our own size or code",
)
#: Model of recipes.time_series -> its column of Table 6 of the Flowformer paper, without the year.
_SERIES = {
    "dtw": "DTW",
    "rocket": "ROCKET",
    "softmax": "TRANS",
    "linear": "LINEAR",
    "reformer": "RE",
    "longformer": "LONG",
    "favor": "PER",
    "yoso": "YOSO-E",
    "cosformer": "COS",
    "flowformer": "FLOW",
}
#: The same for methods that are not quite those of the paper.
_OTHER_SERIES = {"hist_gradient_boosting": "XGBOOST", "lstm": "LSTM", "tcn": "UNSUPER"}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Measured(NamedTuple):
    """One comparison, whose models are rows or columns of a published table, or are drawn in a figure."""

    what: str  # size and data
    cells: dict[str, str]  # by the name of a row, the header of a column of models, or a model in a figure
    column: str  # of the table, that it is compared with; the row, if columns are models; in a figure, of its own
    command: str
    machine: str
    date: str
    limits: str  # what the comparison does not show
    higher_is_better: bool = True
    part: int = 0  # index into a published cell with several numbers, as in "16.78 / 4.23"
    full_size: bool = False  # whether models, data and budget are the paper's
    ratio_to: str = ""  # the row over whose number the cells are
    picture: str = ""  # from the root of the checkout
    scale: str = ""  # how the rows were run, in words, if that is more than their size

    @property
    def size(self) -> str:
        """The size in words."""
        return self.scale or (FULL_SIZE if self.full_size else IN_SMALL)


def measured(paper: str, number: str) -> list[Measured]:
    """Our measurements for a table, or for a "figure-3"."""
    measurements = read_record(_KEPT, dict[str, list[Measured]]).get(f"{paper} {number}", [])
    return [*measurements, *_vowels()] if (paper, number) == ("flowformer", "6") else measurements


def _vowels() -> list[Measured]:
    """JapaneseVowels by the paper's methods and by others, from the file that its comparison wrote."""
    content = read_json(_RECIPES / "time_series" / "japanese_vowels.json", results=list, earlier=list, run=dict)
    columns = {short(header): header for header in read_paper("flowformer").tables["6"].header[1:]}
    runs = [*content["earlier"], content["run"]]
    dates = sorted(run["date"] for run in runs)

    def of(methods: dict[str, str], size: str, full_size: bool, limits: str) -> Measured:
        cells, seeds = {}, defaultdict(list)
        for name, column in methods.items():
            if best := [result["best"] for result in content["results"] if result["model"] == name]:
                cells[columns[column]] = spread(best)
                seeds[len(best)].append(name)
        (usual, _), *others = sorted(seeds.items(), key=lambda item: -len(item[1]))
        counts = [counted(usual, "seed"), *(f"{count} of {', '.join(names)}" for count, names in others)]
        return Measured(
            "JapaneseVowels, 100 epochs; the best of the evaluations on the test series, as the authors' code reports; "
            f"{'; '.join(counts)}; joined from {len(runs)} runs with --add",
            cells,
            "JAPANESEVOWELS",
            f"python -m recipes.time_series.compare --dataset JapaneseVowels --seeds 3 --models {','.join(methods)}",
            "; ".join(dict.fromkeys(run["machine"] for run in runs)),
            " to ".join(dict.fromkeys([dates[0], dates[-1]])),
            limits,
            full_size=full_size,
            scale=size,
        )

    one_set = "One of ten data sets, that of the shortest series."
    others = (
        "Boosted trees are scikit-learn's, the paper does not state the size of its LSTM, and the encoder of the "
        "column UNSUPER. is trained with labels."
    )
    return [of(_SERIES, _VOWELS, True, one_set), of(_OTHER_SERIES, _OTHER_VOWELS, False, f"{one_set} {others}")]


def published_cells(table: PublishedTable, column: str, names: list[str], part: int = 0) -> dict[str, str]:
    """Published cells of ``names``, rows or columns of models; for ``column`` and ``part`` see ``Measured``."""
    rows = {row.name: row for row in table.rows}
    if column in rows:  # models are columns
        printed = dict(zip(table.header, rows[column].cells))
    else:
        printed = {name: table.cell(name, column) for name in names}
    return {name: printed[name].split(" / ")[part] for name in names}


def value(cell: str) -> float:
    """The number with which a cell begins, without its deviation; nan if it has none, as "-" or "OOM"."""
    number = _NUMBER.match(cell)
    return float(number[0].replace(",", "")) if number else math.nan


def kendall(measured: dict[str, str], published: dict[str, str]) -> float | None:
    """Kendall's tau-b between the order of the cells measured and of those published; None below three rows.

    1 is the same order, -1 the reverse; it is nan if all cells are equal, so that there is no order. Deviations are
    ignored, and so are rows with a cell that has no number.
    """
    pairs = [(value(published[name]), value(cell)) for name, cell in measured.items()]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if len(pairs) < 3:
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*pairs)).statistic)


def said_of_order(measured: dict[str, str], published: dict[str, str]) -> str:
    """Kendall's tau in words."""
    tau = kendall(measured, published)
    if tau is None:
        return "Fewer than three rows, so no Kendall's tau."
    if math.isnan(tau):
        return "All rows are equal here or in the paper, so no Kendall's tau."
    first = ", of two numbers in a cell the first" if any(" / " in cell for cell in measured.values()) else ""
    return f"Kendall's tau between the orders{first}: {tau:.2f}."


def run_here(name: str, entry: Entry, found: list[Measured]) -> str:
    """How the row or column ``name``, a model, was run here; empty for what is no model."""
    if isinstance(entry, NotTrained) and (entry.lacks_command or not entry.is_model):
        return "no command" if entry.lacks_command else ""
    sizes = dict.fromkeys(comparison.size for comparison in found if name in (*comparison.cells, comparison.column))
    return ", ".join(sizes) or "not run"


def runs_of(name: str, found: list[Measured]) -> list[str]:
    """The measurements of the row or column ``name``, a line each, and whether any was at full scale."""
    runs = [comparison for comparison in found if name in (*comparison.cells, comparison.column)]
    lines = []
    for comparison in runs:
        all_cells = [f"{model} {cell}" for model, cell in comparison.cells.items()]
        cells = comparison.cells.get(name) or ", ".join(all_cells)
        lines.append(f"measured here: {comparison.size}, {comparison.column}: {cells} ({comparison.what})")
    full_size = any(comparison.full_size for comparison in runs)
    return [*lines, "nothing else of it was run here at full scale" if full_size else "not run here at full scale"]
