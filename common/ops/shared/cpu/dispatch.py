"""When kernels for CPUs are used. Independent of Numba and of all mechanisms.

Kernels support CPU tensors in float32 or float64, to which half precision is converted, of any size. They are operators
of PyTorch, called eagerly and by torch.compile. Plain PyTorch is used for everything else: other devices, torch.export
and tracing, torch.func's transforms, forward-mode gradients, batches of gradients, gradients of gradients, tensor
subclasses, and without Numba or its compiler. ``LINEARTIME_CPU_KERNELS=0`` turns all kernels off.
"""

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from ..tracing import is_compiled, runs_eagerly

#: The environment variable that turns kernels off.
VARIABLE = "LINEARTIME_CPU_KERNELS"

_DTYPES = (torch.float32, torch.float64)
_ORDINARY = (Tensor, torch.nn.Parameter)


def switched_on() -> bool:
    """Whether ``LINEARTIME_CPU_KERNELS`` is not "0"; ValueError unless it is "0", "1", empty or not set."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {VARIABLE} is {value!r}; allowed: '0' (off), '1' (on), or none")
    return value != "0"


def compiles() -> bool:
    """Whether Numba compiles, and was not told to run Python (``NUMBA_DISABLE_JIT``, for debuggers); imports it."""
    return not importlib.import_module("numba").config.DISABLE_JIT


@functools.cache
def has_numba() -> bool:
    """Whether Numba can be imported and compiles; a warning, once, if it is installed and cannot be imported."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        return compiles()
    except Exception as error:  # a library that Numba loads can raise an OSError, and NumPy an AttributeError
        warnings.warn(
            f"Numba cannot be imported ({error}); plain PyTorch is used on a CPU. "
            f"To use it without this warning: {VARIABLE}=0",
            stacklevel=2,
        )
        return False


def applies(*tensors: Tensor) -> bool:
    """Whether kernels are used for ``tensors``, all of one dtype. No kernel is used for empty tensors.

    Raises:
        ValueError: ``LINEARTIME_CPU_KERNELS`` is neither 0 nor 1.
    """
    dtype = tensors[0].dtype
    if dtype not in _DTYPES:
        return False
    for x in tensors:  # faster than all(): this is called for every token
        if not (x.is_cpu and x.dtype == dtype and x.numel() > 0 and type(x) in _ORDINARY):
            return False
    if torch.compiler.is_compiling():
        transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
        return not transformed and is_compiled() and _usable()
    if any(x.is_neg() for x in tensors):  # the imaginary part of a conjugate, whose memory holds the opposite numbers
        return False
    return runs_eagerly(*tensors) and _usable()


def _usable() -> bool:
    """Whether kernels are switched on and Numba is there."""
    return switched_on() and has_numba()


# torch.compiler.assume_constant_result, which would import all of torch.compile: asked once for a graph.
_usable._dynamo_marked_constant = True
