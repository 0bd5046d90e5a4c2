"""Few rounds, short measurements and no retries: these tests do not evaluate times."""

import pytest

from recipes.bench.harness import noise, timing
from recipes.bench.harness.records import Machine


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(noise, "MOST_ATTEMPTS", 1)
    monkeypatch.setattr(noise, "REST", 0.0)


@pytest.fixture
def machine() -> Machine:
    """An example machine for results."""
    where = ("python -m recipes.bench", "2026-11-21", "abc1234", "a cpu", 2, 2, 24.0, 0.1)
    return Machine(*where, "3.11", "torch 2", "CPU", "float32")
