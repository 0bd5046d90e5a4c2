"""Every table and figure of the papers exists, with its rows as printed, and has entries."""

import pytest

from recipes.papers import entries
from recipes.papers.entries import command_of, entries_of
from recipes.papers.tables import PAPERS, read_paper, short
from recipes.papers.trainings import NotTrained, trainings_of

#: Paper -> table -> its number of rows and columns.
SIZES = {
    "flowformer": {
        **{"1": (5, 4), "2": (15, 7), "3": (13, 9), "4": (10, 2), "5": (14, 6), "6": (11, 15), "7": (13, 9)},
        **{"8": (4, 5), "9": (10, 6), "10": (3, 7), "11": (4, 4), "a": (5, 4), "b": (5, 6)},
    },
    "flash": {
        **{"beside-figure-1": (5, 3), "beside-figure-3": (9, 3), "1": (4, 3), "2": (4, 3), "3": (5, 13), "4": (6, 4)},
        **{"5": (6, 6), "6": (17, 2), "7": (17, 3), "8": (13, 8), "9": (13, 8), "10": (13, 6), "11": (4, 5)},
        **{"12": (7, 11), "13": (7, 11)},
    },
    "daft": {
        **{"1": (4, 6), "2": (9, 8), "3": (3, 7), "4": (9, 8), "5": (7, 9), "6": (2, 3), "7": (2, 3), "8": (2, 3)},
    },
}
FIGURES = {"flowformer": 9, "flash": 8, "daft": 14}
TABLES = [(paper, number) for paper in PAPERS for number in read_paper(paper).tables]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_is_there(paper):
    content = read_paper(paper)
    assert {n: (len(table.rows), len(table.header)) for n, table in content.tables.items()} == SIZES[paper]
    assert list(content.figures) == [str(i + 1) for i in range(FIGURES[paper])]
    assert all(command_of(paper, number) for number in content.figures)


@pytest.mark.parametrize("paper, number", TABLES)
def test_every_table_has_its_notes(paper, number):
    table = read_paper(paper).tables[number]
    assert table.notes, "what it was measured with, and what of it is not stated"


@pytest.mark.parametrize("paper, number", TABLES)
def test_rows_are_whole_and_have_names_of_their_own(paper, number):
    table = read_paper(paper).tables[number]
    assert all(len(row.cells) == len(table.header) for row in table.rows)
    assert len({row.name for row in table.rows}) == len(table.rows)
    assert not any("**" in cell or "<u>" in cell for row in table.rows for cell in row.cells)


@pytest.mark.parametrize("paper, number", TABLES)
def test_all_rows_or_all_columns_have_an_entry(paper, number):
    table, row_entries = read_paper(paper).tables[number], entries_of(paper)[number]
    rows, columns = {row.name for row in table.rows}, set(table.header[1:])
    assert rows <= set(row_entries) or columns <= set(row_entries)
    assert all(entry.reason if isinstance(entry, NotTrained) else trainings_of(entry) for entry in row_entries.values())


def test_a_name_that_is_not_printed_is_refused(monkeypatch):
    """A misspelt row name in the YAML file would be lost."""
    paper = read_paper("daft")
    cut = {number: table._replace(rows=table.rows[:-1]) for number, table in paper.tables.items()}
    monkeypatch.setattr(entries, "read_paper", lambda name: paper._replace(tables=cut))
    with pytest.raises(ValueError, match="Table 1 has entries for DAFT; allowed: .*Performer"):
        entries_of.__wrapped__("daft")


def test_values_are_as_printed():
    flowformer, flash, daft = map(read_paper, PAPERS)
    assert flowformer.tables["4"].cell("COSFORMER (2022)", "PERPLEXITY") == "34.1"
    assert flowformer.tables["3"].cell("SYNTHESIZER (TAY ET AL., 2020A)", "2K") == "-"
    assert flowformer.tables["a"].cell("LRA (2020C)", "VERSION") == "not legible"
    assert flash.tables["11"].cell("Performer", "4096") == "OOM"
    assert flash.tables["12"].cell("Transformer", "8192") == "4.8766"
    assert (
        flash.tables["13"].cell("FLASH", "Latency") == "57.2"
        and flash.tables["13"].cell("FLASH", "2048: Lat") == "56.7"
    )
    assert daft.tables["2"].cell("DAFT-conv, Heads 384, Epochs 200", "Top1") == "80.1"
    assert flowformer.tables["7"].cell("HOPPER, MEDIUM-REPLAY", "FLOWFORMER") == "75.5±14.5"
    assert any("786" in note for note in flowformer.tables["8"].contradictions)
    assert any("fairseq 0.10" in note for note in flowformer.tables["4"].contradictions)
    assert any("without distillation" in note for note in flowformer.tables["5"].contradictions)
    with pytest.raises(KeyError, match="TOP-2"):
        flowformer.tables["5"].cell("FLOWFORMER", "TOP-2")


def test_names_without_citations():
    assert short("LINEAR TRANS. (KATHAROPOULOS ET AL., 2020)") == "LINEAR TRANS" and short("DT (2021A)") == "DT"
    assert short("FLOW. (OURS)") == "FLOW" and short("SIGMOID FUNCTION (FINAL VERSION)").endswith("(FINAL VERSION)")


def test_an_unknown_paper_is_named():
    with pytest.raises(ValueError, match="mega.*flowformer, flash, daft"):
        read_paper("mega")
