"""When kernels for CPUs are used. Independent of Numba and of all mechanisms.

Kernels support CPU tensors in float32 or float64, to which half precision is converted, of any size. They are operators
of PyTorch, called eagerly and by torch.compile. Plain PyTorch is used for everything else: other devices, torch.export
and tracing, torch.func's transforms, forward-mode gradients, batches of gradients, gradients of gradients, tensor
subclasses, and without Numba or its compiler. ``LINEARTIME_CPU_KERNELS=0`` turns all kernels off.

One more token after a state takes less time than these questions. So a module remembers the kind of tensors for which
they were asked, and tensors of this kind go to the kernels at once (``step_of``).
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tracing import is_compiled, runs_eagerly

#: The environment variable that turns kernels off.
VARIABLE = "LINEARTIME_CPU_KERNELS"

#: Variables that choose between kernels and plain PyTorch, or are refused.
_SWITCHES = (VARIABLE, "LINEARTIME_TRITON", "TRITON_INTERPRET")
# ``os.environ.get`` takes a microsecond for a variable that is not set, a tenth of a token's time for all of them. Its
# dictionary has no public name; without it, the public one is asked.
_environment = getattr(os.environ, "_data", os.environ)
_names = [getattr(os.environ, "encodekey", str)(name) for name in _SWITCHES]
#: Methods of a module for any number of tokens, and those that do the same for one token of a known kind.
_PAIRS = (("apply_op", "apply_step"), ("operate", "operate_step"))

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


def step_of(op: Callable) -> Callable[[Callable], Callable]:
    """A decorator: the function is ``op`` of q, k, v of one token after a state, by kernels and without a check.

    It gets options, inputs and parameters by name, and only tensors of a kind that ``op`` has computed by kernels.
    """

    def decorate(step: Callable) -> Callable:
        step.op, op.step, op.has_steps, op.kind_of, op.applies = op, step, has_steps, kind_of, _applies_to_numbers
        return step

    return decorate


def _applies_to_numbers(*tensors: Tensor) -> bool:
    """``applies`` to those of ``tensors`` that are not counts."""
    return applies(*(x for x in tensors if x.is_floating_point()))


def has_steps(kind: type) -> bool:
    """Whether ``kind.op.step`` is of this ``op``, and no class below that of ``apply_step`` changes what it does."""
    return kind.op.step.op is kind.op and all(_depth(kind, step) <= _depth(kind, whole) for whole, step in _PAIRS)


def _depth(kind: type, name: str) -> int:
    """How many classes above ``kind`` the method ``name`` is defined."""
    return next((i for i, x in enumerate(kind.__mro__) if name in x.__dict__), len(kind.__mro__))


def kind_of(inputs: dict[str, Any], state: dict[str, Any]) -> list | None:
    """All that checks of tensors by name and the choice of an implementation depend on, except numbers.

    None if something else could decide: gradients, autocast, tracing, transforms, modes, Triton's interpreter, and
    what is no ordinary tensor on a CPU.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    ):
        return None
    kind: list[Any] = [*inputs, *state, *map(_environment.get, _names)]
    if kind[-1] is not None:
        return None
    for x in (*inputs.values(), *state.values()):
        if type(x) is not Tensor or not x.is_cpu or x.is_neg() or torch._C._functorch.is_legacy_batchedtensor(x):
            return None
        kind += x.dtype, x.shape
    return kind
