"""Kernels on threads of OpenMP and of a pool: the same bits, from several Python threads, and after a fork."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops.shared.cpu import threads
from tests.common.ops.shared.cpu.recurrence import GATES, Inputs, random_inputs
from tests.compare import gradients
from tests.processes import run_program

pytest.importorskip("numba")

from common.ops.shared.cpu.compiler import kernel  # noqa: E402
from common.ops.shared.cpu.memory import array  # noqa: E402
from common.ops.shared.cpu.sums import causal_sums  # noqa: E402

#: So many multiply-adds that any number of threads is worth it.
MANY = 2**40


@pytest.fixture
def threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the number of threads that torch reports, and leave torch's own as they are."""
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def large_inputs(gates: str | None = None, seed: int = 0) -> Inputs:
    """Work that is worth three threads, in 7 heads: not a multiple of two or of three."""
    inputs = random_inputs(300 + seed, 64, 64, gates, begun=True, batch=1, heads=7)
    return inputs.leaves(torch.float32)


def everything(inputs: Inputs) -> list[Tensor]:
    """Results and gradients."""
    results = causal_sums(*inputs)
    return [*results, *gradients(torch.cat([x.flatten() for x in results]), inputs.given().values())]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@kernel
def note_parts(first, last, records, work):
    """Write for each head the part that it is in and its work memory: (heads, 3) numbers at ``records``."""
    for head in range(first, last):
        record = array(records, 3 * head, 3, np.float64(0))
        record[0], record[1], record[2] = first, last, work


def parts_of(heads: int, operations: int, work_size: int = 20) -> list[tuple[int, int, int]]:
    """What each call of a kernel gets."""
    records = torch.full((heads, 3), -1.0, dtype=torch.float64)
    threads.run(note_parts, heads, operations, work_size, torch.empty(0), records.data_ptr())
    return sorted({tuple(map(int, record)) for record in records.tolist()})


@pytest.fixture(params=[True, False], ids=["OpenMP", "pool"])
def openmp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the threads of OpenMP, or a pool."""
    if not request.param:
        monkeypatch.setattr(threads, "uses_openmp", lambda: False)
    elif not threads.uses_openmp():
        pytest.skip("torch has no OpenMP with GNU's entry point")


@pytest.mark.usefixtures("openmp")
@pytest.mark.parametrize("count, heads", [(1, 5), (2, 5), (3, 5), (4, 4), (3, 100)])
def test_every_head_is_in_one_part_and_every_part_has_work_memory(count, heads, threads_of_torch):
    threads_of_torch(count)
    parts = parts_of(heads, MANY)
    assert [head for first, last, _ in parts for head in range(first, last)] == list(range(heads))
    assert len(parts) == count
    starts = sorted(work for _, _, work in parts)
    assert all(later - earlier >= 20 * 4 for earlier, later in zip(starts, starts[1:]))
    assert all(work % 64 == 0 for work in starts), "no two threads write to one cache line"


@pytest.mark.usefixtures("openmp")
def test_more_threads_than_heads_and_work_that_is_not_worth_one(threads_of_torch):
    threads_of_torch(8)
    assert len(parts_of(3, MANY)) == 3
    assert len(parts_of(3, 1000)) == 1
    assert parts_of(3, 1000, work_size=0) == [(0, 3, 0)]


def test_linux_has_an_openmp():
    """PyTorch's own builds for Linux have GNU's OpenMP; otherwise all of these tests would be about the pool."""
    if sys.platform == "linux" and torch.backends.openmp.is_available():
        assert threads.uses_openmp()


def run_in_pool(count: int) -> set[threading.Thread]:
    """The threads on which ``count`` parts run at the same time."""
    used, together = set(), threading.Barrier(count)

    def function() -> None:
        together.wait(timeout=20)  # each part on a thread of its own, or it never ends
        used.add(threading.current_thread())

    threads.run_in_pool(function, [()] * count)
    return used


@pytest.mark.usefixtures("openmp")
@pytest.mark.parametrize("gates", GATES)
def test_the_number_of_threads_changes_no_bit(gates, threads_of_torch):
    inputs = large_inputs(gates)
    threads_of_torch(1)
    expected = everything(inputs)
    for count in (2, 3):
        threads_of_torch(count)
        assert same(everything(inputs), expected)


@pytest.mark.usefixtures("openmp")
def test_several_python_threads_at_once(threads_of_torch):
    """They compute for different sequences."""
    threads_of_torch(1)
    inputs = [large_inputs(seed=i) for i in range(4)]
    expected = [everything(x) for x in inputs]
    threads_of_torch(2)
    with ThreadPoolExecutor(4) as callers:
        for _ in range(3):
            assert all(map(same, callers.map(everything, inputs), expected))


def test_one_pool_serves_calls_of_any_size(threads_of_torch):
    """Calls with two parts and with three do not replace each other's pool."""
    threads_of_torch(3)
    used = set().union(*(run_in_pool(2 + i % 2) for i in range(12)))
    assert len(used) == 3, "the calling thread and two others"


def test_another_number_of_threads_gets_another_pool_and_the_old_one_ends(threads_of_torch):
    def workers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("lineartime")}

    threads_of_torch(4)
    run_in_pool(4)
    before = workers()
    assert len(before) == 3
    threads_of_torch(2)
    run_in_pool(2)
    for thread in before:
        thread.join(timeout=20)
    assert len(workers()) == 1 and not before & workers()


def test_the_threads_of_torch_stay_as_they_are():
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    everything(large_inputs())
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


@pytest.mark.parametrize("failing, error", [(0, KeyboardInterrupt), (1, ArithmeticError)])
def test_an_error_in_a_pool_is_raised_when_all_have_ended(failing, error, threads_of_torch):
    """Until then, threads write to tensors that the caller would free."""
    threads_of_torch(2)
    ended = []

    def function(part: int) -> None:
        if part == failing:
            raise error
        time.sleep(0.1)
        ended.append(part)

    with pytest.raises(error):
        threads.run_in_pool(function, [(0,), (1,)])
    assert ended == [1 - failing]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_work_memory_is_on_the_cpu_whatever_the_default_device(device):
    inputs = large_inputs()
    expected = everything(inputs)
    with torch.device(device), torch.no_grad():
        results = causal_sums(*inputs)
    assert same(list(results), expected[:4])


FORKED = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, Dataset
from common.ops.shared.cpu.sums import causal_sums

def two():
    return 2
torch.get_num_threads = two  # torch itself has one thread, as its OpenMP threads do not survive a fork
torch.manual_seed(0)
x = torch.rand(1, 4, 300, 64)
expected = causal_sums(x, x, x, None, None, None)[0]

class Sums(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        torch.get_num_threads = two  # each worker sets it to 1
        return (causal_sums(x, x, x, None, None, None)[0] - expected).abs().max()

child = os.fork()
if child == 0:
    signal.alarm(60)
    q = x.clone().requires_grad_()
    out = causal_sums(q, q, q, None, None, None)[0]
    out.sum().backward()
    os._exit(0 if torch.equal(out, expected) and q.grad.isfinite().all() else 1)
print("child", os.waitpid(child, 0)[1])
assert torch.equal(causal_sums(x, x, x, None, None, None)[0], expected)
print("workers", sum(DataLoader(Sums(), num_workers=2, timeout=60, multiprocessing_context="fork")).item())
"""


def test_after_a_fork_and_in_data_loader_workers():
    """The child of a process with other threads makes a pool of its own."""
    printed = run_program(["-c", FORKED]).split("\n")
    assert "child 0" in printed and "workers 0.0" in printed
