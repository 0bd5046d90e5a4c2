"""The table over data sets: averages of what has all of them, beside the paper's."""

import json
from pathlib import Path

import pytest

from recipes.time_series import averages
from recipes.time_series.results import Plan, Result


def write(path: Path, dataset: str, results: list[Result]) -> str:
    """A file as a comparison leaves it."""
    plan = Plan(dataset, ["flowformer", "dtw"], [1, 2], 100)
    content = {"plan": plan._asdict(), "runs": [], "results": [one._asdict() for one in results]}
    path.write_text(json.dumps(content))
    return str(path)


def test_averages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Means over seeds, then over data sets; the best epoch beside the last; a lacking data set is a dash."""
    first = [Result("flowformer", seed, 1, [90.0, last], 1.0, "") for seed, last in ((1, 80.0), (2, 86.0))]
    vowels = write(tmp_path / "a.json", "JapaneseVowels", [*first, Result("dtw", 1, 0, [94.0], 1.0, "")])
    beats = write(tmp_path / "b.json", "Heartbeat", [Result("flowformer", 1, 1, [70.0, 75.0], 1.0, "")])
    out = tmp_path / "averages.md"
    assert averages.main([vowels, beats, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("flowformer", "dtw"))]
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
