"""Lets commands of recipes start without importing torch and fairseq again."""

from collections.abc import Iterator

import pytest

import tests.config_store  # noqa: F401  configurations are made in half of the time
from recipes import runs
from tests.processes import run_of_recipe


@pytest.fixture(autouse=True, scope="module")
def plain_pytorch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels for CPUs are off in trainings, whose processes would load them for a second; the benchmark keeps them."""
    with pytest.MonkeyPatch.context() as patch:
        if ".bench." not in request.module.__name__:
            patch.setenv("LINEARTIME_CPU_KERNELS", "0")
        yield


@pytest.fixture(scope="module")
def imported_already() -> Iterator[None]:
    """Commands run in processes that have already imported torch and fairseq, the slowest part of small ones.

    Applies until the end of the test file. ``test_runs.py`` runs real processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run", run_of_recipe)
        yield
