"""Lets commands of recipes start without importing torch and fairseq again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import tests.config_store  # noqa: F401  configurations are made in half of the time
from recipes import runs
from tests.processes import Command, Forked


def _run(command: Sequence[object], log: Path, threads: int = 1) -> float:
    """Replaces ``runs.run``: Python's ``-m MODULE ...`` in a fork of one process; ``test_runs.py`` runs real ones."""
    flag, module, *arguments = map(str, command)
    assert flag == "-m"
    forked = Forked(Command(module, arguments))
    with open(log, "a", encoding="utf-8") as file:
        file.writelines(forked.printed())
    if forked.wait():
        raise RuntimeError(f"{log} ends with: {log.read_text(encoding='utf-8').strip().splitlines()[-1]}")
    return 1.0


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
        patch.setattr(runs, "run", _run)
        yield
