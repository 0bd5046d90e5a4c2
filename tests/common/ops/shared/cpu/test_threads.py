"""Kernels on several threads: the same bits, from several Python threads, after a fork and in data loader workers."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from common.ops.shared.cpu import threads
from tests.common.ops.shared.cpu.recurrence import GATES, Inputs, random_inputs
from tests.compare import gradients
from tests.processes import run_program

pytest.importorskip("numba")

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


def parts_of(
    count: int, heads: int, operations: int, work_size: int = 20
) -> list[tuple[int, int, int, threading.Thread]]:
    """What each call of a kernel gets, and its thread."""
    parts, together = [], threading.Barrier(count)

    def kernel(first: int, last: int, argument: str, work: int) -> None:
        assert argument == "argument"
        together.wait(timeout=20)  # each part on a thread of its own, or it never ends
        parts.append((first, last, work, threading.current_thread()))

    threads.run(kernel, heads, operations, work_size, torch.empty(0), "argument")
    return sorted(parts, key=lambda part: part[0])


@pytest.mark.parametrize("count, heads", [(1, 5), (2, 5), (3, 5), (4, 4), (3, 100)])
def test_every_head_is_in_one_part_and_every_part_has_work_memory(count, heads, threads_of_torch):
    threads_of_torch(count)
    parts = parts_of(count, heads, MANY)
    assert [head for first, last, *_ in parts for head in range(first, last)] == list(range(heads))
    assert all(first < last for first, last, *_ in parts)
    starts = sorted(work for _, _, work, _ in parts)
    assert all(later - earlier >= 20 * 4 for earlier, later in zip(starts, starts[1:]))
    assert all(work % 64 == 0 for work in starts), "no two threads write to one cache line"
    assert len({thread for *_, thread in parts}) == count


def test_more_threads_than_heads_and_work_that_is_not_worth_one(threads_of_torch):
    threads_of_torch(8)
    assert len(parts_of(3, 3, MANY)) == 3
    assert len(parts_of(1, 3, 1000)) == 1
    assert parts_of(1, 3, 1000, work_size=0)[0][:3] == (0, 3, 0)


@pytest.mark.parametrize("gates", GATES)
def test_the_number_of_threads_changes_no_bit(gates, threads_of_torch):
    inputs = large_inputs(gates)
    threads_of_torch(1)
    expected = everything(inputs)
    for count in (2, 3):
        threads_of_torch(count)
        assert same(everything(inputs), expected)


def test_several_python_threads_at_once(threads_of_torch):
    """They share a pool, and compute for different sequences."""
    threads_of_torch(1)
    inputs = [large_inputs(seed=i) for i in range(4)]
    expected = [everything(x) for x in inputs]
    threads_of_torch(2)
    with ThreadPoolExecutor(4) as callers:
        for _ in range(3):
            assert all(map(same, callers.map(everything, inputs), expected))


def test_one_pool_serves_calls_of_any_size(threads_of_torch):
    """Calls that are worth two threads and three do not replace each other's pool."""
    threads_of_torch(3)
    used = {thread for i in range(12) for *_, thread in parts_of(2 + i % 2, 2 + i % 2, MANY)}
    assert len(used) == 3, "the calling thread and two others"


def test_another_number_of_threads_gets_another_pool_and_the_old_one_ends(threads_of_torch):
    def workers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("lineartime")}

    threads_of_torch(4)
    parts_of(4, 4, MANY)
    before = workers()
    assert len(before) == 3
    threads_of_torch(2)
    parts_of(2, 4, MANY)
    for thread in before:
        thread.join(timeout=20)
    assert len(workers()) == 1 and not before & workers()


def test_the_threads_of_torch_stay_as_they_are():
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    everything(large_inputs())
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


def test_an_error_on_any_thread_is_raised_when_all_have_ended(threads_of_torch):
    """Until then, threads write to tensors that the caller would free."""
    threads_of_torch(2)
    for failing in (0, 1):
        ended = []

        def kernel(first: int, last: int, work: int, failing: int = failing, ended: list = ended) -> None:
            if first == failing:
                raise KeyboardInterrupt if failing == 0 else ArithmeticError
            time.sleep(0.1)
            ended.append(first)

        with pytest.raises(KeyboardInterrupt if failing == 0 else ArithmeticError):
            threads.run(kernel, 2, MANY, 20, torch.empty(0))
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
    """The child of a process with a pool makes its own."""
    printed = run_program(["-c", FORKED]).split("\n")
    assert "child 0" in printed and "workers 0.0" in printed
