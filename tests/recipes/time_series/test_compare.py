"""The comparison of attentions on time series: commands, table, and skipping of complete trainings."""

import json
from pathlib import Path

import pytest
from fairseq import options
from PIL import Image

import fairseq_plugin  # noqa: F401  registers what the commands name
from recipes.shared.architectures import known_names
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data, Record
from recipes.shared.trainings import TrainingResult
from recipes.time_series import compare
from recipes.time_series.compare import Series
from tests.recipes.folders import made_by

CASES = ["1,2,3:4,5,6:a", "3,2,1:6,5,4:b"]
HEADER = ["@problemName Toy", "@timeStamps false", "@univariate false", "@classLabel true a b", "@data"]
POINT = '2026-11-22 06:00:0%d | INFO | test | {"epoch": %d, "test_accuracy": "%s", "test_num_updates": "%d"}'


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments of a comparison of two models, two seeds and six epochs on two series."""
    for part in ("TRAIN", "TEST"):
        (tmp_path / f"Toy_{part}.ts").write_text("\n".join([*HEADER, *CASES]) + "\n")
    names = ["--dataset", "Toy", "--file", str(tmp_path / "Toy_TRAIN.ts"), "--out", str(tmp_path / "out")]
    return [*names, "--archs", "flowformer,linear_time_series", "--seeds", "2", "--epochs", "6"]


def record(model: str, accuracies: list[float], parameters: int = 0, seconds: float = 60.0) -> Record:
    """The record of a training with these accuracies."""
    fields = {"model": model, "seed": 1, "parameters": parameters, "seconds": seconds}
    return {**fields, "accuracies": accuracies, **compare.ends(accuracies)}


def train_arguments(name: str, longest: int, dataset: str = "JapaneseVowels", epochs: int = 100) -> list[object]:
    """The arguments of fairseq-train for a model of series with a given maximum length."""
    options = Series(dataset=dataset, models=[name], epochs=epochs)
    return compare.train_arguments(options, Data(Path("data"), {"longest": longest}), name, 1)


def complete(out: Path, name: str, accuracies: list[float]) -> None:
    """Write a folder as a complete training does."""
    folder = out / name
    folder.mkdir(parents=True)
    trained = TrainingResult(name, "fairseq-train ...", 60.0, 2**30, "2026-11-22", "a machine", "versions")
    (folder / "result.json").write_text(json.dumps(trained._asdict()))
    lines = ["$ fairseq-train ...", "INFO | num. shared model params: 6,446,089 (num. trained: 6,446,089)"]
    lines += [
        POINT % (i, epoch, accuracy, 17 * epoch) for i, (epoch, accuracy) in enumerate(zip((2, 4, 6), accuracies))
    ]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def test_complete_trainings_become_a_table(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nothing is trained again; last and best epoch, mean and deviation over seeds; files and a picture."""
    for name, accuracies in (
        ("flowformer.1", [50.0, 90.0, 80.0]),
        ("flowformer.2", [60.0, 70.0, 84.0]),
        ("linear.1", [10.0, 20.0, 30.0]),
        ("linear.2", [10.0, 20.0, 30.0]),
    ):
        complete(tmp_path / "out", name, accuracies)
    made_by(compare.EXPERIMENT.command, tmp_path / "out")
    assert compare.main(arguments) == 0
    output = capsys.readouterr().out
    (row,) = [line.split() for line in output.splitlines() if line.strip().startswith("flowformer_time_series")]
    assert row[1:9] == ["6.45", "M", "82.00", "±", "2.83", "87.00", "±", "4.24"]
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["model"] for row in content["results"]] == ["flowformer", "flowformer", "linear", "linear"]
    assert content["results"][0]["accuracies"] == [50.0, 90.0, 80.0] and content["plan"]["epochs"] == 6
    assert "| flowformer_time_series | 6.45 M | 82.00 ± 2.83 |" in (tmp_path / "out" / "results.md").read_text()
    with Image.open(tmp_path / "out" / "accuracy.png") as image:
        assert image.width > 600
    complete(tmp_path / "short", "linear.1", [10.0])
    with pytest.raises(ValueError, match="linear.1/train.log .*epochs 2; allowed: .*2 of 6"):
        compare.read(Series(epochs=6), tmp_path / "short" / "linear.1", {"model": "linear"})


def test_trainings_of_another_part_are_added(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """They are not repeated, the table names their run, and the options determine which rows are shown."""
    for name in ("flowformer.1", "flowformer.2"):
        complete(tmp_path / "first", name, [50.0, 90.0, 80.0])
    made_by(compare.EXPERIMENT.command, tmp_path / "first")
    first = [*arguments[:5], str(tmp_path / "first"), *arguments[6:]]
    assert compare.main([*first, "--archs", "flowformer"]) == 0
    part = tmp_path / "first" / "results.json"
    for name in ("linear.1", "linear.2"):
        complete(tmp_path / "out", name, [10.0, 20.0, 30.0])
    made_by(compare.EXPERIMENT.command, tmp_path / "out")
    assert compare.main([*arguments, "--add", str(part)]) == 0
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["model"] for row in whole["results"]] == ["flowformer", "flowformer", "linear", "linear"]
    assert len(whole["earlier"]) == 1 and "with trainings of" in (tmp_path / "out" / "results.txt").read_text()
    assert compare.main([*arguments, "--epochs", "4", "--add", str(part)]) == 1
    assert "of Toy, 6 epochs; allowed: Toy, 4 epochs" in capsys.readouterr().err
    assert compare.main([*arguments, "--add", str(tmp_path / "out" / "results.txt")]) == 1
    assert "results.txt cannot be read: " in (error := capsys.readouterr().err) and "allowed: results.json" in error


def test_trainings_on_other_series_are_not_shown(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Neither those in the folder nor those that are added; the folder keeps its data."""
    out = tmp_path / "out"
    for name in ("flowformer.1", "flowformer.2"):
        complete(out, name, [50.0, 90.0, 80.0])
    made_by(compare.EXPERIMENT.command, out)
    arguments = [*arguments, "--archs", "flowformer"]
    assert compare.main(arguments) == 0
    before = {path.name: path.read_bytes() for path in (out / "data").iterdir()}
    swapped = [case[:-1] + {"a": "b", "b": "a"}[case[-1]] for case in CASES]
    (tmp_path / "Toy_TEST.ts").write_text("\n".join([*HEADER, *swapped]) + "\n")
    capsys.readouterr()
    assert compare.main(arguments) == 1
    printed = capsys.readouterr()
    assert "series_sha256 is " in printed.err and f"allowed in {out}" in printed.err and not printed.out
    assert {path.name: path.read_bytes() for path in (out / "data").iterdir()} == before
    added = ["--out", str(tmp_path / "new"), "--add", str(out / "results.json")]
    assert compare.main([*arguments, *added]) == 1
    assert "results.json is of other series" in capsys.readouterr().err


def test_commands_are_fairseqs_and_differ_in_the_model_alone() -> None:
    """The authors' training; fairseq's parser accepts every option of every architecture."""
    own_options = {}
    for name in known_names(compare.SUFFIX):
        command = [str(x) for x in train_arguments(name, 26)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, "--cpu"])
        assert (parsed.optimizer, parsed.lr, parsed.clip_norm, parsed.batch_size) == ("radam", [0.001], 4.0, 16)
        reach = [str(x) for x in compare.scaled_window_arguments(name, 26)]
        begin = command.index(reach[0]) if reach else 0
        assert command[begin : begin + len(reach)] == reach
        del command[begin : begin + len(reach)]
        own_options[name] = [x for x in command if x != f"{name}_time_series"]
    assert {"flowformer", "softmax", "linear", "flash", "daft_full", "daft_conv", "mixed_chunk"} <= {
        *compare.default_names()
    }
    assert "flow" not in compare.default_names()
    assert all(
        command == own_options["flowformer"] for name, command in own_options.items() if "chunk" not in str(command)
    )


@pytest.mark.parametrize("longest, chunk", [(7, 16), (26, 16), (100, 64), (1751, 256)])
def test_about_two_chunks_to_a_series(longest: int, chunk: int) -> None:
    assert compare.chunk_arguments("flash", longest) == ["--flash-chunk-size", chunk]
    assert compare.chunk_arguments("mixed_chunk", longest) == ["--mixed-chunk-chunk-size", chunk]
    assert compare.chunk_arguments("linear", longest) == []


def test_epochs_and_optimizer_are_the_authors() -> None:
    assert compare.EPOCHS == {"PEMS-SF": 400} and compare.DEFAULT_EPOCHS == 100
    assert "adam" in train_arguments("linear", 93, "SpokenArabicDigits")


@pytest.mark.parametrize("epochs, validate, save", [(100, 2, 10), (14, 2, 2), (15, 1, 5), (1, 1, 1)])
def test_the_last_epoch_is_evaluated_and_saved(epochs: int, validate: int, save: int) -> None:
    """fairseq does neither by default when --max-epoch ends a training."""
    command = train_arguments("linear", 100, "BasicMotions", epochs)
    intervals = [command[command.index(option) + 1] for option in ("--validate-interval", "--save-interval")]
    assert intervals == [validate, save] and Series(epochs=epochs).evaluated[-1] == epochs


def test_a_single_evaluation_is_drawn_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of one point would be invisible."""
    drawn_curves = []
    monkeypatch.setattr(compare.plt.Axes, "plot", lambda self, *points, **style: drawn_curves.append((points, style)))
    monkeypatch.setattr(compare, "legend_beside", lambda axes: None)
    for epochs in (1, 3):
        options = Series(dataset="BasicMotions", models=["linear"], epochs=epochs)
        records = [record("linear", [90.0] * len(options.evaluated))]
        compare.draw(options, {}, records, tmp_path / f"{epochs}.png")
    curves = [style["marker"] for points, style in drawn_curves if "label" in style]
    assert curves[0] and not curves[1]


def test_many_models_have_a_panel_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a line for each seed, by epoch; a method that is not a network has dots alone."""
    shown = []
    monkeypatch.setattr(compare, "save", lambda figure, *_, **__: shown.append(figure))
    networks = compare.default_names()[:13]
    options = Series(models=[*networks, "dtw"], epochs=6)
    records = [record(name, [90.0, 92.0, 91.0]) | {"seed": seed} for name in networks for seed in (1, 2)]
    compare.draw(options, {}, [*records, record("dtw", [94.9])], tmp_path / "a.png")
    panels = [axes for axes in shown[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels[:-1]] == [f"{name}, 2 seeds" for name in networks]
    for axes in panels[:-1]:
        assert [list(line.get_data()[0]) for line in axes.lines] == [[2, 4, 6]] * 2
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == [*networks, "dtw"]
    compare.plt.close(shown[0])


def test_methods_that_are_no_networks_stand_in_the_same_table_and_picture(tmp_path: Path) -> None:
    """Rows without parameters but with the paper's column; names are separated by spaces or commas."""
    parse = compare.EXPERIMENT.parse
    assert parse(["--models", "dtw", "rocket,lstm_time_series"]).models == ["dtw", "rocket", "lstm"]
    assert parse([]).models == compare.default_names()
    options = Series(models=["dtw", "hist_gradient_boosting", "lstm", "tcn", "linear"], seeds=2, epochs=6)
    records = [record("dtw", [94.9]), record("tcn", [90.0, 92.0, 91.0], 400_000)]
    report = compare.EXPERIMENT.report(options, {"earlier": []}, Results(records, {}))
    (table,) = report.tables
    assert table.rows[0] == ("dtw", "-", "94.90", "94.90", "94.9", "1", "1.0")
    assert [row[0] for row in table.rows] == [
        "dtw", "hist_gradient_boosting", "lstm_time_series", "tcn_time_series", "linear_time_series"
    ]  # fmt: skip
    assert [row[4] for row in table.rows] == ["94.9", "86.5", "79.7", "98.9", "99.2"]
    assert any("XGBoost" in note and "support vector" in note for note in table.notes)
    report.draw(tmp_path / "accuracy.png")
    with Image.open(tmp_path / "accuracy.png") as image:
        assert image.width > 600


def test_a_fit_is_read_as_a_training_is(tmp_path: Path) -> None:
    complete(tmp_path, "rocket.2", [77.0])
    outcome = compare.read(Series(epochs=6), tmp_path / "rocket.2", {"model": "rocket"})
    assert outcome == {"accuracies": [77.0], "last": 77.0, "best": 77.0}
