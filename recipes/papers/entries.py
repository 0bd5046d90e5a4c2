"""The entry of each row of each table: its training, or why there is none."""

import functools

from .rows import arena, daft_images, daft_sequences, episodes, flash, imagenet, series, trivia, wikitext
from .tables import PublishedTable, read_paper, short
from .trainings import Entry, NotTrained, each

#: Entries by the name of a row, or by the header of a column where columns are the models.
Entries = dict[str, Entry]
_BENCHMARKS = {"LRA": "2", "WIKITEXT": "4", "IMAGENET": "5", "UEA": "6", "D4RL": "7"}
_SUMMARIES = {"Long": "2", "Vision": "5", "Language": "4", "Time": "6", "Offline": "7"}
#: Where to see what DAFT's Table 1 says.
_COMPLEXITY = {
    "Transformer": "softmax_lm",
    "Linear Transformer": "linear_lm",
    "Performer": "favor_lm",
    "DAFT": "daft_full_lm",
}


@functools.cache
def entries_of(paper: str) -> dict[str, Entries]:
    """The entries of each table of ``paper``, by its number."""
    tables = read_paper(paper).tables
    made = {"flowformer": _flowformer, "flash": _flash, "daft": _daft}[paper](tables)
    return {number: made[number] for number in tables}


def _rows(table: PublishedTable) -> list[str]:
    return [row.name for row in table.rows]


def _benchmark(row: str) -> NotTrained:
    return NotTrained(f"a benchmark: Table {_BENCHMARKS[short(row)]}")


def _flowformer(tables: dict[str, PublishedTable]) -> dict[str, Entries]:
    def printed_parameters(row: str) -> Entry:
        return imagenet.trained(row, tables["5"].cell(row, "PARAMS"))

    return {
        "1": each(_rows(tables["1"]), _benchmark),
        "2": each(_rows(tables["2"]), arena.trained),
        "3": each(_rows(tables["3"]), arena.timed),
        "4": each(_rows(tables["4"]), wikitext.trained),
        "5": each(_rows(tables["5"]), printed_parameters),
        "6": series.trained(tables["6"]),
        "7": episodes.trained(tables["7"]),
        "8": each(_rows(tables["8"]), lambda row: NotTrained("a size of the model `flowformer_hier_s`")),
        "9": each(_rows(tables["9"]), series.data_set),
        "10": each(_rows(tables["10"]), arena.with_features),
        "11": each(_rows(tables["11"]), arena.with_functions),
        "a": each(_rows(tables["a"]), _benchmark),
        "b": each(_rows(tables["b"]), lambda row: NotTrained(f"of Table {_SUMMARIES[row.split()[0]]}")),
    }


def _flash(tables: dict[str, PublishedTable]) -> dict[str, Entries]:
    def modified(number: str) -> Entries:
        table = tables[number]
        return each(_rows(table), lambda row: flash.modified(row, table.cell(row, "Params")))

    beside = tables["beside-figure-3"]
    return {
        "beside-figure-1": each(_rows(tables["beside-figure-1"]), flash.sped_up),
        "beside-figure-3": each(_rows(beside), lambda row: flash.sized(row, beside)),
        "1": modified("1"),
        "2": modified("2"),
        "3": each(_rows(tables["3"]), flash.books),
        "4": each(_rows(tables["4"]), trivia.trained),
        "5": each(_rows(tables["5"]), flash.approximated),
        "6": each(_rows(tables["6"]), flash.setting),
        "7": each(_rows(tables["7"]), flash.setting),
        "8": flash.specified(tables["8"], "mlm", "c4"),
        "9": flash.specified(tables["9"], "lm", "wiki40b"),
        "10": flash.specified(tables["10"], "lm", "pg19", "large"),
        "11": each(_rows(tables["11"]), flash.timed),
        "12": each(_rows(tables["12"]), flash.masked),
        "13": each(_rows(tables["13"]), flash.causal),
    }


def _daft(tables: dict[str, PublishedTable]) -> dict[str, Entries]:
    def bound(row: str) -> NotTrained:
        return NotTrained(
            f"a bound; `python -m recipes.cost --arch {_COMPLEXITY[row]} --tokens 512 1024 2048` measures"
        )

    return {
        "1": each(_rows(tables["1"]), bound),
        "2": each(_rows(tables["2"]), lambda row: daft_images.trained(row, tables["2"])),
        "3": each(_rows(tables["3"]), lambda row: daft_images.tuned(row, tables["3"])),
        "4": each(_rows(tables["4"]), daft_sequences.pixels),
        "5": each(_rows(tables["5"]), daft_sequences.characters),
        "6": each(_rows(tables["6"]), daft_images.factorised),
        "7": each(_rows(tables["7"]), daft_images.reparameterised),
        "8": each(_rows(tables["8"]), daft_images.queried),
    }
