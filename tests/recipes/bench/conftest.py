"""Few rounds and short measurements: these tests learn nothing from times."""

import pytest

from recipes.bench.harness import timing


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.001)
