"""Measurements of the tables' rows made here: small experiments, each with its command, machine and date."""

import json
from pathlib import Path
from typing import NamedTuple

from ..shared.tables import spread
from .tables import read_paper, short

_RECIPES = Path(__file__).parents[1]


class Measured(NamedTuple):
    """One comparison whose models are rows, or columns, of a published table."""

    what: str  # of which size and data
    cells: dict[str, str]  # by the name of a row, or the header of a column of models
    column: str  # of the table, with which it compares; its row where models are columns
    command: str
    machine: str
    date: str
    higher_is_better: bool = True


def measured(paper: str, number: str) -> list[Measured]:
    """Everything that was measured here of a table."""
    found = {("flowformer", "2"): _arena, ("flowformer", "4"): _text, ("flowformer", "6"): _vowels}
    return found[paper, number]() if (paper, number) in found else []


#: Accuracy, mean and deviation over seeds; recipes/lra/README.md has all of it.
_LISTOPS = {
    "FLOWFORMER": "37.4 ± 0.8",
    "LINEAR TRANS. (KATHAROPOULOS ET AL., 2020)": "37.2 ± 2.4",
    "TRANSFORMER (VASWANI ET AL., 2017)": "36.3 ± 0.3",
}
_LISTOPS_FURTHER = {
    "SYNTHESIZER (TAY ET AL., 2020A)": "40.7 ± 0.0",
    "COSFORMER (ZHEN ET AL., 2022)": "38.2 ± 0.7",
    "LINFORMER (WANG ET AL., 2020)": "38.0 ± 1.1",
    "BIGBIRD (ZAHEER ET AL., 2020)": "36.8 ± 1.3",
    "REFORMER (KITAEV ET AL., 2020)": "36.5 ± 1.1",
    "PERFORMER (CHOROMANSKI ET AL., 2021)": "36.5 ± 1.1",
    "SPARSE TRANS. (CHILD ET AL., 2019)": "36.3 ± 1.0",
    "SINKHORN TRANS. (TAY ET AL., 2020B)": "36.1 ± 1.6",
    "LOCAL ATTENTION (TAY ET AL., 2021)": "35.9 ± 1.3",
    "LONGFORMER (BELTAGY ET AL., 2020)": "35.5 ± 1.8",
    "TRANSFORMER (VASWANI ET AL., 2017)": "35.4 ± 1.1",
}
#: Perplexity per character, mean and deviation over seeds; recipes/wikitext103/README.md has all of it.
_CHARACTERS = {
    "TRF-TRANSFORMER-GATE (2021)": "6.52 ± 0.03",
    "REFORMER (2020)": "8.54",
    "TRANSFORMER (2017)": "9.05 ± 0.13",
    "PERFORMER (2021)": "10.56 ± 0.20",
    "LINEAR TRANS. (2020)": "10.64 ± 0.07",
    "COSFORMER (2022)": "10.84 ± 0.08",
    "FLOWFORMER": "11.03 ± 0.04",
    "TRF-TRANSFORMER (2021)": "11.48 ± 0.03",
}


def _arena() -> list[Measured]:
    command = "python -m recipes.lra.compare --task listops --length 256 --seeds"
    what = "ListOps of fewer than 256 symbols, 1 layer of width 64, 1,500 updates; test accuracy"
    further = " ".join(
        ("softmax cosformer favor longformer local sparse bigbird linformer synthesizer sinkhorn", "reformer")
    )
    return [
        Measured(f"{what}, 3 seeds", _LISTOPS, "LISTOPS", f"{command} 3", "2 CPU cores, AMD EPYC", "2026-11-22"),
        Measured(
            f"{what}, 2 seeds",
            _LISTOPS_FURTHER,
            "LISTOPS",
            f"{command} 2 --models {further}",
            "2 CPU cores, Intel Xeon",
            "2026-11-23",
        ),
    ]


def _text() -> list[Measured]:
    what = "1.0 MB of characters, 2 layers of width 128, 800 updates of 2,048 tokens; test perplexity, 3 seeds"
    command = "python -m recipes.wikitext103.compare --file tinyshakespeare.txt --updates 800 --jobs 1"
    machine = "2 CPU cores, shared"
    return [Measured(what, _CHARACTERS, "PERPLEXITY", command, machine, "2026-11-22", higher_is_better=False)]


def _vowels() -> list[Measured]:
    """JapaneseVowels, from the file that its comparison wrote."""
    content = json.loads((_RECIPES / "time_series" / "japanese_vowels.json").read_text(encoding="utf-8"))
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
        best = [max(one["accuracies"]) for one in content["results"] if one["name"] == name]
        if best:
            cells[columns[column]] = spread(best)
    run = content["runs"][0]
    what = "JapaneseVowels in the paper's size, 100 epochs; the best test accuracy of a run, as the paper reports"
    return [Measured(what, cells, "JAPANESEVOWELS", run["command"], run["machine"], run["date"])]


def kendall(measured: Measured, published: dict[str, str]) -> float | None:
    """Kendall's tau-b between the order of what was measured and of what is published; None below three rows.

    1 is the same order, -1 the reverse. Deviations are not looked at.
    """
    both = [(float(published[name]), float(cell.split()[0])) for name, cell in measured.cells.items()]
    if len(both) < 3:
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*both)).statistic)
