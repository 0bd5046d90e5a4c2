"""The accuracies of several comparisons and their average over data sets in one table, as in Table 6 of the paper.

Run ``python -m recipes.time_series.averages work/time_series/compare/*/results.json`` from the checkout's root.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.command_parser import CommandParser

from ..shared.experiment import Record
from ..shared.scripts import script
from ..shared.summaries import summarise
from ..shared.tables import MISSING, Table
from .compare import in_paper, read_results, shown_name

COMMAND = "recipes.time_series.averages"


def gathered(paths: Sequence[Path]) -> dict[str, list[Record]]:
    """Read the records of comparisons: data set -> records.

    Raises:
        ValueError: a file is not the result of a comparison, or two files have the same data set.
    """
    records_of_datasets: dict[str, list[Record]] = {}
    for path in paths:
        results = read_results(path)
        dataset = results.plan.dataset
        if dataset in records_of_datasets:
            raise ValueError(f"{path} is of {dataset}, as a file before it; allowed: one file for each data set")
        records_of_datasets[dataset] = results.records
    return records_of_datasets


def tables(results: Mapping[str, Sequence[Record]]) -> list[Table]:
    """A table of accuracies after the last epoch, and one of the best epoch."""
    return [
        table("Accuracy after the last epoch", results, "last"),
        table("Accuracy of the best epoch, chosen on the test series as by the authors' code", results, "best"),
    ]


def table(title: str, results: Mapping[str, Sequence[Record]], value: str) -> Table:
    """A row per model: the mean over seeds for each data set, their average, and the paper's average.

    ``value`` is the field of a record to average, "last" or "best".
    """
    names = list(dict.fromkeys(record["model"] for records in results.values() for record in records))
    rows = []
    for name in names:
        means = [[record[value] for record in records if record["model"] == name] for records in results.values()]
        means = [statistics.mean(values) if values else None for values in means]
        paper = [in_paper(dataset, name) for dataset in results]
        rows.append((shown_name(name), *map(_shown, means), _average(means), _average(paper)))
    notes = [
        "per cent of the test series, means over seeds; an average where a model has all data sets",
        "the last column is the average of the paper's numbers over the same data sets",
    ]
    return Table(title, ("model", *results, "average", "paper's average"), rows, notes)


def _shown(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}"


def _average(values: Sequence[float | None]) -> str:
    return _shown(None if None in values else statistics.mean(values))


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="JSON", help="results.json of a comparison")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables, as Markdown")
    return parser


@script("averages")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    summarise(COMMAND, arguments, options.out, lambda: tables(gathered(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
