"""Runs a kernel on several threads, each of which does some of the heads.

The threads are those of a pool of this process, as many as ``torch.get_num_threads()`` with the calling one. They are
Python threads, since a kernel releases the GIL: unlike those of OpenMP they survive a fork, for which a child process
makes a new pool, and they may be used from several Python threads at the same time.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

#: Multiply-adds for which another thread is worth waking, about 0.3 ms: below it two threads were slower than one.
_WORTH_A_THREAD = 2**24


def run(kernel: Callable, heads: int, operations: int, work_size: int, like: torch.Tensor, *arguments: Any) -> None:
    """Call ``kernel(first, last, *arguments, work)`` so that all ``heads`` are done.

    ``operations`` are the multiply-adds of all heads. ``work`` is the address of ``work_size`` numbers of the dtype of
    ``like``, for each thread its own. They are not initialised.
    """
    threads = 1 + operations // _WORTH_A_THREAD
    if threads > 1:
        threads = min(torch.get_num_threads(), heads, threads)
    if threads == 1 and work_size == 0:
        kernel(0, heads, *arguments, 0)
        return
    size = -(-work_size // 16) * 16  # each part begins at a cache line
    work = torch.empty(threads, size, dtype=like.dtype, device="cpu")  # whatever the default device is
    if threads == 1:
        kernel(0, heads, *arguments, work.data_ptr())
        return
    borders = [heads * i // threads for i in range(threads + 1)]
    parts = [(first, last, *arguments, x.data_ptr()) for first, last, x in zip(borders, borders[1:], work)]
    pool = _pool(os.getpid(), torch.get_num_threads())
    others = [pool.submit(kernel, *part) for part in parts[1:]]
    try:
        kernel(*parts[0])
    finally:
        wait(others)  # also after an interrupt: they write to tensors that the caller would free
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The pool of this process; that of another number of threads ends when it is replaced."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="lineartime")
