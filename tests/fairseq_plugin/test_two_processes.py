"""Two processes, one of whose batches has padding, train as one process does: every task and criterion."""

from pathlib import Path

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.tasks import TASK_REGISTRY

import fairseq_plugin
from tests.common.parallel.processes import Processes
from tests.compare import assert_all_close
from tests.fairseq_plugin.helpers import unequal_batches
from tests.fairseq_plugin.helpers.unequal_batches import CASES, WITHOUT_PADDING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unequal")
    unequal_batches.write(folder)
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path):
    return unequal_batches.configuration(folder)


@pytest.fixture(scope="module")
def printed(folder: Path, settings) -> list[str]:
    """Train all cases in two processes, one case after another, which takes the seconds."""
    processes = Processes(2, folder, unequal_batches.save_all, str(folder), settings)
    processes.wait()
    return processes.printed()


def _names(registry: dict[str, type]) -> set[str]:
    return {name for name, kind in registry.items() if kind.__module__.startswith(fairseq_plugin.__name__)}


def test_every_task_and_criterion_is_there(folder: Path) -> None:
    built = [unequal_batches.build(name, folder) for name in CASES]
    for registry, seen in ((TASK_REGISTRY, "task"), (CRITERION_REGISTRY, "criterion")):
        classes = {type(getattr(training, seen)) for training in built}
        missing = {name for name in _names(registry) if registry[name] not in classes}
        assert not missing


@pytest.mark.parametrize("name", CASES)
def test_what_is_logged_is_of_one_kind(name: str, folder: Path) -> None:
    """fairseq sums numbers and tensors of a log apart, in the order in which they stand there."""
    for mode, (first, *others) in unequal_batches.kinds(name, folder).items():
        for other in others:
            assert list(first.items()) == list(other.items()), mode


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name: str, folder: Path, settings, printed: list[str]) -> None:
    one = unequal_batches.train(name, folder, settings)
    files = [folder / f"{name}.{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), "\n".join(text[-2000:] for text in printed)
    two = [torch.load(file) for file in files]
    assert name in WITHOUT_PADDING or name == "context_parallel" or any(two[1]["padding"])
    assert not any(two[0]["padding"])
    for each in two:
        for found, expected in zip(each["logs"], one["logs"], strict=True):
            assert "loss" in found and found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert_all_close(one["weights"], each["weights"].values(), one["weights"].values(), 1e-5)


def test_a_process_that_is_lost_is_named(folder: Path, settings, tmp_path: Path) -> None:
    """One of two that hold a sequence is killed after its last message, where fairseq would reduce next."""
    processes = Processes(2, tmp_path, unequal_batches.one_is_killed, str(folder), settings)
    codes = processes.wait(60)
    assert 0 not in codes and None not in codes
    assert "process 0, rank 0 of 2 that train together, has lost process 1, which ended" in processes.printed()[0]
