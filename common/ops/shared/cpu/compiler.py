"""Decorators that compile kernels with Numba, stored so that the next process need not compile them again.

A kernel loops over heads. It releases the GIL, so that several threads can run it on different heads, and gets tensors
as addresses and strides; see ``memory``.
"""

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

logger = logging.getLogger(__name__)

#: What LLVM may do to floating-point numbers: contract and reorder sums. NaN and inf keep their meaning.
_FAST = {"contract", "reassoc", "arcp", "nsz"}
_OPTIONS = {"fastmath": _FAST, "error_model": "numpy"}

#: A function that kernels call in their loops.
inlined = numba.njit(**_OPTIONS, forceinline=True)


def kernel(function: Callable) -> Callable:
    """Compile ``function`` at its first call, for each dtype.

    The machine code is stored next to the source file or, where that is not writable, in the user's cache folder.
    Where neither is, each process compiles again.
    """
    # Numba compiles again if the kernel's own file changes, but not if a file changes whose functions it calls. The
    # name of a stored file is made of this name.
    function.__qualname__ += f"-{_digest()}"
    compiled = numba.njit(**_OPTIONS, nogil=True)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # there is no writable folder
        stored = None
    else:
        folder = Path(compiled.stats.cache_path)
        stored = next(folder.glob(f"*{function.__qualname__}*"), None) if folder.is_dir() else None
    if stored is None:
        _say_that_it_compiles()
    return compiled


@functools.cache
def _digest() -> str:
    """A digest of the files with kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("cpu/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _say_that_it_compiles() -> None:
    """Log, once in a process."""
    logger.info("kernels for CPUs are compiled, which takes some seconds; LINEARTIME_CPU_KERNELS=0 turns them off")
