"""Decorators that compile kernels with Numba, stored so that the next process need not compile them again.

A kernel loops over heads. It releases the GIL, so that several threads can run it on different heads, and gets tensors
as addresses and strides; see ``memory``.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numba

#: What LLVM may do to floating-point numbers: contract and reorder sums. NaN and inf keep their meaning.
_FAST = {"contract", "reassoc", "arcp", "nsz"}
_OPTIONS = {"fastmath": _FAST, "boundscheck": None, "error_model": "numpy"}

#: A function that kernels call.
helper = numba.njit(**_OPTIONS)
#: A function that kernels call in their innermost loops.
inlined = numba.njit(**_OPTIONS, forceinline=True)


def kernel(function: Callable) -> Callable:
    """Compile ``function`` at its first call, for each dtype.

    The machine code is stored next to the source file or, where that is not writable, in the user's cache folder.
    Where neither is, each process compiles again.
    """
    # Numba compiles again if the kernel's own file changes, but not if a file does that it calls. The name of the
    # stored file is made of this name.
    function.__qualname__ = f"{function.__qualname__}-{_sources()}"
    compiled = numba.njit(**_OPTIONS, nogil=True)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no writable folder
        pass
    return compiled


@functools.cache
def _sources() -> str:
    """A digest of all files of ``common/ops``."""
    folder, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(folder.rglob("cpu/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
