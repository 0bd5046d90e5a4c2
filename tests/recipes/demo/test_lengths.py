"""Tokens per second of a training step, with a fake clock."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.demo import lengths


def test_speed_is_that_of_the_fastest_step_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 5, 2 and 3 seconds: the first is a warm-up; steps repeat until enough time has passed."""
    (tmp_path / "dict.txt").write_text("word 1\n")
    times = iter([0.0, 0.5, 1.0, 3.0, 3.0, 4.0, 4.0, 7.0])
    monkeypatch.setattr(lengths, "time", SimpleNamespace(perf_counter=times.__next__))
    monkeypatch.setattr(lengths, "TOKENS_PER_STEP", 32)
    monkeypatch.setattr(lengths, "SECONDS", 4.0)
    assert lengths.measure(tmp_path, "softmax_lm", 8) == 32.0
    assert next(times, None) is None
