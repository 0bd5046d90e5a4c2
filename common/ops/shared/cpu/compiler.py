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
from numba.core.caching import FunctionCache, NullCache

logger = logging.getLogger(__name__)

#: What LLVM may do to floating-point numbers: contract and reorder sums. NaN and inf keep their meaning. Not
#: "arcp", with which LLVM estimates 1/x and 1/√x: an estimate for an infinite x is NaN.
_FAST = {"contract", "reassoc", "nsz"}
_OPTIONS = {"fastmath": _FAST, "error_model": "numpy"}

#: A function that kernels call in their loops. Python cannot call it, and what that would need is not compiled: it
#: would take a fifth of the time.
inlined = numba.njit(**_OPTIONS, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def kernel(function: Callable) -> Callable:
    """Compile ``function`` at its first call, for each dtype.

    The machine code is stored next to the source file or, where that is not writable, in the user's cache folder.
    Where neither is, and where storing fails, each process compiles again.
    """
    # Numba compiles again if the kernel's own file changes, but not if a file changes whose functions it calls. The
    # name of a stored file is made of this name.
    function.__qualname__ += f"-{_digest()}"
    compiled = numba.njit(**_OPTIONS, nogil=True)(function)
    try:
        compiled._cache = _Stored(function)  # Numba's enable_caching, with a cache that may fail
    except RuntimeError:  # there is no writable folder
        compiled._cache = _NotStored()
    return compiled


class _Stored(FunctionCache):
    """Numba's cache of a function, except that files that cannot be read or written only make it compile again."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for these types, None if it must be compiled."""
        try:
            stored = super().load_overload(sig, target_context)
        except Exception as error:  # unpickling a damaged file can raise anything
            logger.warning("%s holds a damaged kernel (%r), which is compiled again", self.cache_path, error)
            self._write(self.flush)  # otherwise the damaged index would be read before it is written
            stored = None
        # Two processes that write at once, for different types, can give their files the same name.
        if stored is None or tuple(stored.signature.args) != tuple(sig):
            _say_that_it_compiles()
            return None
        return stored

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function."""
        self._write(super().save_overload, sig, data)

    def _write(self, write: Callable, *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            logger.warning("compiled kernels cannot be stored in %s (%s)", self.cache_path, error)


class _NotStored(NullCache):
    """No cache."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        """None: the function must be compiled."""
        _say_that_it_compiles()


@functools.cache
def _digest() -> str:
    """A digest of the files with kernels, and of Numba's version: two versions would replace each other's files."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parents[2].rglob("cpu/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _say_that_it_compiles() -> None:
    """Log, once in a process, and keep Numba from logging each step of its compiler at level DEBUG.

    Models of fairseq that are imported in Python set that level for all loggers, and then Numba writes ten thousand
    lines. A level that the user gave Numba's logger stays.
    """
    if (numbas := logging.getLogger("numba")).level == logging.NOTSET:
        numbas.setLevel(logging.INFO)
    logger.info("kernels for CPUs are compiled, which can take half a minute; LINEARTIME_CPU_KERNELS=0 turns them off")
