"""Runs a function on a pool of Python threads, which a kernel lets run together as it releases the GIL.

The pool belongs to its process: a child process that was made by a fork makes its own. It may be used from several
Python threads at the same time.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch


def run(function: Callable, parts: Sequence[tuple]) -> None:
    """Call ``function(*part)`` for all parts, the first one on the calling thread.

    There are at most ``torch.get_num_threads()`` parts. An error of a part is raised when all have ended.
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
    """The pool of this process; that of another number of threads ends when it is replaced."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="lineartime")
