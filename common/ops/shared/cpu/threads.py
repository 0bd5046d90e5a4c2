"""Runs a kernel on several threads, each of which does some of the heads.

As many threads as ``torch.get_num_threads()`` are used: those of torch's own OpenMP (``team``) or, where there is none,
a pool of Python threads. A child process that was made by a fork has no threads of OpenMP, which would wait
for them forever; it uses a pool.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

#: Multiply-adds for which another thread is worth waking: about 0.08 ms for one of OpenMP and 0.5 ms for one of a pool.
_WORTH_A_THREAD, _WORTH_A_POOL = 2**21, 2**24
#: The process that imported this.
_PROCESS = os.getpid()


def run(kernel: Callable, heads: int, operations: int, work_size: int, like: torch.Tensor, *arguments: Any) -> None:
    """Call ``kernel(first, last, *arguments, work)`` so that all ``heads`` are done.

    ``operations`` are the multiply-adds of all heads. ``work`` is the address of ``work_size`` numbers of the dtype of
    ``like``, for each thread its own. They are not initialised.
    """
    parts = _parts(heads, operations)
    if parts == 1 and work_size == 0:
        kernel(0, heads, *arguments, 0)
        return
    size = -(-work_size // 16) * 16  # each part begins at a cache line
    work = like.new_empty(parts, size)
    if parts == 1:
        kernel(0, heads, *arguments, work.data_ptr())
    elif uses_openmp():
        from . import team

        stride = size * work.element_size()
        team.run(kernel, like.dtype, torch.get_num_threads(), heads, parts, work.data_ptr(), stride, arguments)
    else:
        borders = [heads * i // parts for i in range(parts + 1)]
        run_in_pool(kernel, [(*pair, *arguments, x.data_ptr()) for *pair, x in zip(borders, borders[1:], work)])


def _parts(heads: int, operations: int) -> int:
    """How many parts the heads are divided into, each for a thread."""
    threads = torch.get_num_threads()
    if threads == 1 or operations < _WORTH_A_THREAD:
        return 1
    worth = _WORTH_A_THREAD if uses_openmp() else _WORTH_A_POOL
    return min(threads, heads, 1 + operations // worth)


def uses_openmp() -> bool:
    """Whether threads are those of torch's OpenMP, and not those of a pool. It imports Numba."""
    if os.getpid() != _PROCESS:
        return False
    from . import team

    return team.EXISTS


def run_in_pool(function: Callable, parts: Sequence[tuple]) -> None:
    """Call ``function(*part)`` for all parts, the first one on the calling thread, the others on Python threads.

    There are at most ``torch.get_num_threads()`` parts. An error of a part is raised when all have ended. It may be
    called from several Python threads at the same time.
    """
    pool = _pool(os.getpid(), torch.get_num_threads())
    others = [pool.submit(function, *part) for part in parts[1:]]
    try:
        function(*parts[0])
    finally:
        wait(others)  # also after an interrupt: they write to tensors that the caller would free
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The pool of this process, not that of its parent; the pool of another number of threads ends when replaced."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="lineartime")
