"""Lets commands of recipes start without importing torch and fairseq again."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import tests.config_store  # noqa: F401  configurations are made in half of the time
from recipes import runs
from recipes.shared import commands
from tests.processes import Command, Forked


class _Popen:
    """Replaces ``subprocess.Popen`` in ``commands.run``: ``python -m MODULE ...`` in a fork of one process."""

    def __init__(self, command: list[str], cwd: str, env: dict[str, str], **_: object) -> None:
        python, flag, module, *arguments = command
        assert (python, flag) == (commands.shown_path(sys.executable), "-m")
        self._forked = Forked(Command(module, arguments), cwd=str(cwd), environment=env)
        self.pid = self._forked.pid

    @property
    def stdout(self) -> list[str]:
        """The printed lines, available when the command has ended."""
        return [line for text in self._forked.printed() for line in text.splitlines(keepends=True)]

    def wait(self) -> int:
        """The exit status."""
        return self._forked.wait()

    poll = wait


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
    streams = dict.fromkeys(("DEVNULL", "PIPE", "STDOUT"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "subprocess", SimpleNamespace(Popen=_Popen, **streams))
        patch.setattr(runs, "run", _run)
        yield
