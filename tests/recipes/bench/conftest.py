"""Few rounds, short measurements and no second attempts: these tests learn nothing from times."""

import pytest

from recipes.bench.harness import noise, timing


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(noise, "MOST_ATTEMPTS", 1)
    monkeypatch.setattr(noise, "REST", 0.0)
