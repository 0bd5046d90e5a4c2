"""``python -m recipes.papers``: lists, tables, rows, figures, and the tables of the READMEs."""

import pytest

from recipes.papers import measured, readmes
from recipes.papers.__main__ import main
from recipes.papers.tables import PAPERS, read_paper


def test_a_list_has_every_table_and_figure(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    begun = [line.split()[0] for line in lines if line.startswith("  ")]
    for paper in PAPERS:
        content = read_paper(paper)
        assert set(content.tables) | {f"figure-{number}" for number in content.figures} <= set(begun)
        assert any(line.startswith(f"{paper}: ") for line in lines)


@pytest.mark.parametrize(
    "arguments, shown",
    [
        ("flowformer 6", ["flowformer_time_series", "Contradiction", "98.48 ± 0.29", "Kendall", "2026-11-22"]),
        (
            "flowformer 6",
            ["All rows in one comparison: python -m recipes.time_series.compare", "alone, at the paper's size"],
        ),
        ("flowformer 6 --row lstm", ["of our own size or code, JAPANESEVOWELS: ", "not run here at full scale"]),
        ("flowformer 6 --row dtw", ["alone, at the paper's size, JAPANESEVOWELS: ", "nothing else of it was run"]),
        ("flowformer 6 --row soft", ["no command", "grid of an image"]),
        ("flowformer 6 --row japanesevowels", ["at the paper's size", "XGBOOST (2016) 91.4"]),
        ("flowformer 4 --row flowformer", ["Equation 9", "--lineartime-post-norm", "--flow-clamp 5", "not known"]),
        ("flowformer 5 --row deit-s", ["deit_small_distilled_patch16_224", "deit_small_patch16_224", "8 GPUs x 128"]),
        ("flowformer 5 --row cosformer", ["6 GPUs x 128"]),
        ("flash 3 --row flash", ["per word", "tokens_per_word"]),
        ("flash 10", ["495.8 M", "496 M", "No row was run here."]),
        ("daft 2 --row resnet50", ["convolutional", "--model resnet50 --epochs 90", "validate.py"]),
        ("daft 4 --row pixelcnn", ["no command", "convolutional"]),
        ("daft 4 --row daft-full", ["--activation-fn gelu", "--decoder-learned-pos", "Chen et al."]),
        ("flowformer figure-8", ["recipes.time_series.pictures"]),
        ("flowformer figure-1", ["diagram"]),
        ("flash 11", ["published (over Transformer++)", "222.4 (1.00)", "measured here, over Transformer++"]),
        ("flash figure-7", ["# Drawn in recipes/flash/figure7.png", "FLASH (GlobalOnly)", "2026-11-26"]),
        ("flash figure-6", ["# Measured here: 512 and 4,096 tokens", "Not drawn here.", "a command that draws it"]),
        ("flowformer figure-4", ["# Drawn in recipes/imagenet/attention.png", "a command that draws it"]),
        ("flowformer figure-7", ["# Drawn in recipes/imagenet/allocation.png"]),
        ("daft figure-7", ["Not drawn here.", "the command that draws it"]),
        ("flowformer 5", ["in small, 80 epochs", "orders, of two numbers in a cell the first: -0.50."]),
        ("flowformer 6", ["3 seeds; 1 of dtw; 5 of flowformer; joined from"]),
        ("daft 7", ["3 seeds", "Kendall's tau"]),
    ],
)
def test_a_table_a_row_and_a_figure(arguments, shown, capsys):
    """Output includes measurements, or the reason why there are none or why nothing trains or draws it."""
    assert main(arguments.split()) == 0
    text = " ".join(capsys.readouterr().out.replace("\n# ", "\n").split())
    assert all(word in text for word in shown)


#: Beginning of a line of Table 6 -> a word of the line that says what is here of it.
SAID = {"LSTM (1997)": "lstm_time_series", "SOFT (2021)": "SOFT pools"}


def test_each_row_says_whether_it_was_run(capsys):
    assert main(["flowformer", "4"]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("  FLOWFORMER  ") and "flowformer_lm" in line]
    assert row.endswith("in small")
    assert main(["flowformer", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (lstm,), (soft,) = ([x for x in lines if x.startswith(f"  {name}") and word in x] for name, word in SAID.items())
    assert lstm.endswith("JapaneseVowels alone, with a method of our own size or code") and soft.endswith("no command")
    assert main(["daft", "2"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "timm's resnet50" in line]
    assert row.rstrip().endswith("not run"), "no model of ours, but its commands are there"
    assert main(["flash", "12"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "_mlm" in line and "not run" in line]) == 7


def test_a_row_prints_commands_from_data_to_evaluation(capsys):
    assert main(["flash", "12", "--row", "flash-quad"]) == 0
    lines = capsys.readouterr().out.splitlines()
    typed = [line for line in lines if line and not line.startswith((" ", "#"))]
    begun = ["(set", "python", "for", "fairseq-train", "fairseq-validate", "done", ")"]
    assert [line.split()[0] for line in typed] == begun
    assert any("not run here" in line for line in lines)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["mega"], ["mega", "flowformer", "flash", "daft"]),
        (["daft", "9"], ["9", "8", "figure-14"]),
        (["DAFT", "Table 9"], ["TABLE is Table 9", "figure-14"]),
        (["flowformer", "figure-10"], ["figure-10", "figure-9"]),
        (["flowformer", "4", "--row", "mega"], ["mega", "COSFORMER (2022)"]),
        (["daft", "2", "--row", "DAFT-conv"], ["DAFT-conv, Heads 16", "DAFT-conv, Heads 384"]),
        (["flowformer", "figure-8", "--row", "a"], ["--row"]),
        (["flowformer", "--row", "a"], ["--row", "TABLE"]),
        (["daft", "--write-readmes"], ["--write-readmes", "daft"]),
    ],
)
def test_what_is_not_there_is_an_error_with_what_is(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(word in error for word in said)


@pytest.mark.parametrize("path", readmes.readmes(), ids=lambda path: path.parent.name)
def test_the_tables_of_a_readme_are_those_of_the_papers(path):
    """If this fails, run python -m recipes.papers --write-readmes."""
    text = path.read_text()
    assert readmes.rewritten(text) == text


def test_every_recipe_of_a_paper_names_the_command_that_prints_its_tables():
    for name in ("wikitext103", "flash", "enwik8", "cifar10_pixels", "imagenet", "lra", "time_series", "offline_rl"):
        text = (readmes.RECIPES / name / "README.md").read_text()
        assert "python -m recipes.papers " in text, name


def test_a_readme_is_made_anew_and_nothing_else_in_it_changes():
    text = "before\n<!-- published: daft 6 -->\nold\n<!-- end of published -->\nbehind\n"
    rewritten = readmes.rewritten(text)
    assert rewritten.startswith("before\n<!--") and rewritten.endswith("-->\nbehind\n") and "old" not in rewritten
    assert "| Non Factorized | 3.17 | 78.2 | `daft_full_s --model-kwargs bias_dim=0` |" in rewritten
    assert readmes.rewritten(rewritten) == rewritten
    with pytest.raises(ValueError, match="Table 99 of daft"):
        readmes.rewritten(text.replace("daft 6", "daft 99"))


def test_a_readme_has_what_was_measured_and_what_was_not_run():
    """A column per comparison, each of which says which rows it lacks."""
    document = readmes.document("flowformer", read_paper("flowformer").tables["2"])
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in document.splitlines() if line.startswith("| ")}
    assert rows["MODEL"].endswith("| in small (1) | in small (2) | in small (3) |")
    assert rows["LOCAL ATTENTION (TAY ET AL., 2021)"].endswith("| not run | 35.9 ± 1.3 | not run |")
    assert rows["FLOWFORMER W/O COMPETITION"].endswith("| not run | not run | 37.5 ± 0.3 |")
    assert document.count("Kendall's tau between the orders: 0.33.") == 2
    assert document.count("none of the four other tasks.") == 1  # the limits of two of them, once


@pytest.mark.parametrize("paper", PAPERS)
def test_what_was_measured_belongs_to_rows(paper):
    for number, table in read_paper(paper).tables.items():
        for record in measured.measured(paper, number):
            rows = [row.name for row in table.rows]
            assert set(record.cells) <= set(rows) or (set(record.cells) <= set(table.header) and record.column in rows)
            assert record.command.removeprefix("LINEARTIME_CPU_KERNELS=0 ").startswith("python -m recipes.")
            assert record.date.startswith("2026-") and record.limits
            assert list(measured.published_cells(table, record.column, list(record.cells), record.part)) == list(
                record.cells
            )


def test_kendalls_tau_is_of_the_order():
    cells = {"a": "3 ± 1", "b": "2", "c": "1"}
    assert measured.kendall(cells, {"a": "30", "b": "20", "c": "10"}) == 1.0
    assert measured.kendall(cells, {"a": "10", "b": "20", "c": "30"}) == -1.0
    assert measured.kendall({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) is None


@pytest.mark.parametrize("nothing", ["nan ± nan", "inf", "-", "OOM"])
def test_cells_without_a_number_have_no_place_in_the_order(nothing):
    cells, published = {"a": "3", "b": nothing, "c": "2", "d": "1"}, dict.fromkeys("abcd", "1")
    assert measured.kendall(cells, cells) == 1.0 and "1.00" in measured.said_of_order(cells, cells)
    assert measured.kendall(cells, published | {"c": nothing}) is None
    assert measured.said_of_order(cells, published) == "All rows are equal here or in the paper, so no Kendall's tau."
