"""The table over data sets: scores of both kinds of files, with averages of means and of deviations."""

import json
from pathlib import Path

import pytest

from recipes.offline_rl import averages


def description(name: str) -> dict:
    """A description of data with returns from 0 to 200."""
    sizes = {"mean": [0.0], "std": [1.0], "low": [-1.0], "high": [1.0], "longest": 10}
    return {"name": name, "environment": "", **sizes, "lowest": 0.0, "average": 50.0, "highest": 200.0}


def episodes(*totals: float) -> list[dict]:
    """Episodes for a target, and one for a lower target, which is ignored."""
    high = [{"target": 9.0, "seed": i, "total": total, "steps": 5} for i, total in enumerate(totals)]
    return [*high, {"target": 1.0, "seed": 0, "total": 1e6, "steps": 5}]


def test_averages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    compared = [
        {"model": "bc", "episodes": episodes(20.0, 40.0)},
        {"model": "bc", "episodes": episodes(50.0)},
        {"model": "awac", "episodes": episodes(100.0)},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"data": description("one"), "results": compared}))
    played = {"x.pt": episodes(100.0), "y.pt": episodes(140.0)}
    models = {"x.pt": "bc_decision", "y.pt": "bc_decision"}
    (tmp_path / "b.json").write_text(json.dumps({"data": description("two"), "episodes": played, "models": models}))
    files, out = [str(tmp_path / "a.json"), str(tmp_path / "b.json")], tmp_path / "averages.md"
    assert averages.main([*files, "--out", str(out)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "data bc_decision awac_decision" in lines
    assert "one 20.0 ± 7.1 50.0" in lines and "two 60.0 ± 14.1 -" in lines and "average 40.0 ± 10.6 -" in lines
    assert "| average | 40.0 ± 10.6 | - |" in out.read_text()
    (tmp_path / "c.json").write_text('{"data": {}}')
    assert averages.main([str(tmp_path / "c.json")]) == 1
    assert "c.json" in (error := capsys.readouterr().err) and "data cannot be read" in error and "allowed" in error


def test_a_model_with_an_addition_is_another_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    played = {"x.pt": episodes(100.0), "y.pt": episodes(140.0)}
    models = {"x.pt": "linear_decision", "y.pt": "linear_decision+forget"}
    content = {"data": description("one"), "episodes": played, "models": models}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert averages.main([str(tmp_path / "a.json")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "data linear_decision linear_decision+forget" in lines and "one 50.0 70.0" in lines


def test_a_file_that_is_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    compared = [{"model": "bc", "episodes": episodes(20.0)}]
    (tmp_path / "a.json").write_text(json.dumps({"data": description("one"), "results": compared}))
    assert averages.main([str(tmp_path / "a.json"), str(tmp_path / ".." / tmp_path.name / "a.json")]) == 1
    assert "a.json is given twice" in capsys.readouterr().err


def test_other_data_of_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Own data of one environment has one name, but returns of its own, which bound the scores."""
    compared = [{"model": "bc", "episodes": episodes(20.0)}]
    for name, highest in (("a.json", 200.0), ("b.json", 300.0)):
        data = {**description("one"), "highest": highest}
        (tmp_path / name).write_text(json.dumps({"data": data, "results": compared}))
    assert averages.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "b.json is of other data" in (error := capsys.readouterr().err) and "allowed as one" in error
