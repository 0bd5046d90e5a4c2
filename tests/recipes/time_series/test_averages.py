"""The table over data sets: averages of methods with all data sets, next to the paper's."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.time_series import averages
from recipes.time_series.compare import ends

RUN = {"command": "x", "machine": "x", "versions": "x", "date": "2026-11-22", "minutes": 1.0}


def record(model: str, seed: int, *accuracies: float) -> dict[str, Any]:
    """The record of a training with these accuracies."""
    fields = {"model": model, "seed": seed, "parameters": 1, "seconds": 1.0, "peak_bytes": 1, "command": ""}
    return {**fields, "accuracies": list(accuracies), **ends(accuracies)}


def write(path: Path, dataset: str, results: list[dict[str, Any]]) -> str:
    """Write a file as a comparison does."""
    plan = {"models": ["flowformer", "dtw"], "seeds": 2, "dataset": dataset, "epochs": 100}
    path.write_text(json.dumps({"plan": plan, "run": RUN, "earlier": [], "results": results}))
    return str(path)


def test_averages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Means over seeds, then over data sets; best and last epoch; a missing data set is a dash."""
    first = [record("flowformer", seed, 90.0, last) for seed, last in ((1, 80.0), (2, 86.0))]
    vowels = write(tmp_path / "a.json", "JapaneseVowels", [*first, record("dtw", 1, 94.0)])
    beats = write(tmp_path / "b.json", "Heartbeat", [record("flowformer", 1, 70.0, 75.0)])
    out = tmp_path / "averages.md"
    assert averages.main([vowels, beats, "--out", str(out)]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(("flowformer", "dtw"))]
    assert rows[0] == ["flowformer_time_series", "83.0", "75.0", "79.0", "88.2"]
    assert rows[1] == ["dtw", "94.0", "-", "-", "83.3"]
    assert rows[2][1:4] == ["90.0", "75.0", "82.5"]
    assert "| flowformer_time_series | 83.0 | 75.0 | 79.0 | 88.2 |" in out.read_text()
    assert averages.main([vowels, beats, "--out", str(out)]) == 0
    assert averages.main([vowels, vowels]) == 1
    assert "JapaneseVowels, as a file before it; allowed" in capsys.readouterr().err
    (tmp_path / "c.json").write_text("{}")
    assert averages.main([str(tmp_path / "c.json")]) == 1
    assert "c.json" in (error := capsys.readouterr().err) and "allowed: results.json" in error
