"""Outcomes of a comparison with complete trainings: failures and interruptions do not affect other outcomes."""

import json
from pathlib import Path

import pytest

from recipes.shared import comparison
from recipes.shared.commands import CommandFailed
from recipes.shared.comparison import MODEL, SEEDS, Column, Results, planned_trainings, rows, train_and_read
from recipes.shared.experiment import Record
from recipes.shared.trainings import Training, TrainingResult
from tests.recipes.folders import made_by


def result(model: str, seed: int, score: str) -> Record:
    """An outcome."""
    return {"model": model, "seed": seed, "score": score}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Complete trainings of two models with two seeds each."""
    for name in ("a-x.1", "b.1", "a-x.2", "b.2"):
        folder = tmp_path / name
        folder.mkdir()
        trained = TrainingResult(name, "fairseq-train", 60.0, 2**30, "2026-11-22", "a machine", "versions")
        (folder / "result.json").write_text(json.dumps(trained._asdict()))
        made_by("recipes.shared.trainings", folder)
    return tmp_path


def evaluate(folder: Path) -> None:
    """The command of an evaluation, which fails for one training."""
    if folder.name == "b.1":
        raise CommandFailed("fairseq-generate\nended with exit status 1:\nout of memory\n")
    (folder / "score").write_text(folder.name)


def read(model: str, seed: int, folder: Path, trained: TrainingResult) -> Record | None:
    """The score that the command wrote."""
    score = folder / "score"
    return result(model, seed, score.read_text()) if score.exists() else None


def test_outcomes_model_by_model_and_why_one_is_missing(runs: Path, capsys: pytest.CaptureFixture) -> None:
    planned = planned_trainings(["a/x", "b"], (1, 2), lambda model, seed: ["data", "--seed", seed])
    assert planned[1] == ("b", 1, Training("b.1", ["data", "--seed", 1]))
    compared = train_and_read(planned, runs, 1, read, evaluate)
    assert compared.outcomes == [result("a/x", 1, "a-x.1"), result("a/x", 2, "a-x.2"), result("b", 2, "b.2")]
    assert compared.failed == {"b.1": "out of memory"} and compared.status == 1 and not compared.interrupted
    assert "fairseq-generate" in capsys.readouterr().err


def test_records_of_the_same_path_are_refused_before_any_is_made(tmp_path: Path) -> None:
    path = tmp_path / "flow_ours.1.json"
    with pytest.raises(ValueError, match="two records are called flow_ours.1"):
        comparison.make_records((path, dict) for _ in range(2))
    assert not path.exists()


def test_seeds_are_those_with_outcomes() -> None:
    counts = {"3 seeds": (3, 3), "1 seed": (1,), "2 to 3 seeds": (2, 3), "0 seeds": ()}
    for said, numbers in counts.items():
        assert comparison.counted_seeds({str(i): [{}] * number for i, number in enumerate(numbers)}) == said


def test_after_an_interruption_nothing_runs_and_what_is_there_is_read(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "train_all", interrupted)
    (runs / "b.2" / "score").write_text("kept")
    planned = planned_trainings(["a/x", "b"], (1, 2), lambda model, seed: ["data"])
    compared = train_and_read(planned, runs, 1, read, evaluate)
    assert compared.outcomes == [result("b", 2, "kept")] and compared.interrupted and compared.status == 1
    assert "Interrupted" in capsys.readouterr().err


def test_cells_without_outcomes() -> None:
    columns = [MODEL, Column("score", lambda outcomes: outcomes[0]["score"]), SEEDS, Column("size", known=str.upper)]
    compared = Results([result("b", 1, "high")], {"a.1": "too large"})
    table = comparison.table("Title", columns, ["a", "b"], compared, ["a note"])
    assert table.header == ("model", "score", "seeds", "size")
    assert table.rows == [("a", "-", "0", "A"), ("b", "high", "1", "B")]
    assert table.notes == ["a note", "not trained: a.1: too large"]


def test_a_row_has_the_records_of_its_model_alone() -> None:
    """Also if one model's name is a prefix of the other's."""
    records = [{"model": "flow"}, {"model": "flow+elu"}, {"model": "flow+elu"}]
    assert rows([MODEL, SEEDS], ["flow", "flow+elu", "elu"], records) == [
        ("flow", "1"),
        ("flow+elu", "2"),
        ("elu", "0"),
    ]
