"""Table 11 in small: models in turns, over Transformer++."""

import json

from recipes.flash import speed
from recipes.flash.measurements import FUSED


def test_runs_are_stored_and_made_once(tmp_path, monkeypatch, capsys):
    """Every length has a ratio for each model; with another model all are measured again."""
    arguments = ["--out", str(tmp_path / "out"), "--quick", "--seeds", "1", "--models", FUSED, "flash_lm"]
    assert speed.main(arguments) == 0
    records = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    cases = [(name, length) for name in (FUSED, "flash_lm") for length in (64, 128)]
    assert [(record["model"], record["length"]) for record in records] == cases
    assert all(record["ratio"] == 1.0 for record in records[:2])
    assert all(record["ratio"] > 0 and record["seconds"] > 0 for record in records)
    assert max(record["parameters"] for record in records) < 1.05 * min(record["parameters"] for record in records)
    monkeypatch.setattr(speed, "interleave", None)
    assert speed.main(arguments) == 0
    monkeypatch.undo()
    assert speed.main([*arguments, "performer_lm", "--lengths", "64"]) == 0
    shown = capsys.readouterr().out
    assert "Performer-Matmul" in shown and "runs: 1" in shown


def test_nothing_to_divide_by_is_an_error(tmp_path, capsys):
    assert speed.main(["--models", "flash_lm", "--out", str(tmp_path / "out")]) == 1
    assert f"--models is flash_lm; allowed: {FUSED}" in capsys.readouterr().err
