"""Kernels on several threads: the same bits with any number, from several Python threads, and after a fork."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.ops.shared.cpu import threads
from tests.common.ops.cpu.kernels import OPERATORS, VARIABLE, draw, everything, results
from tests.processes import CHECKOUT, run_program

pytest.importorskip("numba")

operators = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have turned kernels off."""
    monkeypatch.delenv(VARIABLE, raising=False)


def same(found: Iterable[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, operator, monkeypatch):
    """Work that is worth three threads, in 10 heads: no multiple of three. A dtype has machine code of its own."""
    tensors = draw(OPERATORS[operator], 200, 48, 48, heads=5, dtype=dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = everything(OPERATORS[operator], tensors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # torch's own threads stay as they are
    assert same(everything(OPERATORS[operator], tensors), expected)
    with torch.device("meta"), torch.no_grad():  # a default device is not that of working memory
        assert same(results(OPERATORS[operator], tensors).values(), expected)


def test_several_python_threads_at_once(monkeypatch):
    """They compute for different sequences."""
    calls = [(name, draw(name, 200, 48, 48, heads=5, dtype=torch.float32)) for name in OPERATORS.values()]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = [everything(*call) for call in calls]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with ThreadPoolExecutor(3) as callers:
        assert all(map(same, callers.map(lambda call: everything(*call), calls), expected))


#: torch itself has one thread, as its OpenMP threads do not survive a fork; a child has a pool of Python threads.
FORKED = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
from common.ops.shared.cpu import threads
from tests.common.ops.cpu.kernels import OPERATORS, draw, everything

def three():
    return 3
torch.get_num_threads = three
names = list(OPERATORS.values())
calls = [(name, draw(name, 400, 64, 64, heads=5, dtype=torch.float32)) for name in names]
expected = [everything(*call) for call in calls]

def check():
    torch.get_num_threads = three  # a worker sets it to 1
    return all(torch.equal(x, y) for call, wanted in zip(calls, expected) for x, y in zip(everything(*call), wanted))

class Checks(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return check()

child = os.fork()
if child == 0:
    signal.alarm(120)
    right = check()
    torch.get_num_threads = lambda: 2  # another pool
    os._exit(0 if right and check() else 1)
print("child", os.waitpid(child, 0)[1])
workers = DataLoader(Checks(), num_workers=1, batch_size=None, timeout=120, multiprocessing_context="fork")
print("workers", list(workers), "parent", check())
"""


def test_after_a_fork_and_in_workers_of_data_loaders():
    assert run_program(["-c", FORKED], cwd=str(CHECKOUT)).splitlines() == [
        "child 0",
        "workers [True, True] parent True",
    ]


@pytest.mark.parametrize("failing, error", [(0, KeyboardInterrupt), (1, ArithmeticError)])
def test_an_error_in_a_pool_is_raised_when_all_have_ended(failing, error, monkeypatch):
    """Until then, threads write to tensors that the caller would free."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended = []

    def function(part: int) -> None:
        if part == failing:
            raise error
        time.sleep(0.1)
        ended.append(part)

    with pytest.raises(error):
        threads.run_in_pool(function, [(0,), (1,)])
    assert ended == [1 - failing]
