"""One more token after a state: nothing is checked or asked again for tensors of a kind that was computed before."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: Variables that choose between kernels and plain PyTorch, or are refused.
_SWITCHES = ("LINEARTIME_CPU_KERNELS", "LINEARTIME_TRITON", "TRITON_INTERPRET")
# ``os.environ.get`` takes a microsecond for a variable that is not set, a tenth of a token's time for all of them. Its
# dictionary has no public name; without it, the public one is asked.
_environment = getattr(os.environ, "_data", os.environ)
_names = [getattr(os.environ, "encodekey", str)(name) for name in _SWITCHES]


def step_of(op: Callable) -> Callable[[Callable], Callable]:
    """A decorator: the function is ``op`` of q, k, v of one token after a state, by kernels and without a check.

    It gets options, inputs and parameters by name, and only tensors of a kind that ``op`` has computed by kernels.
    """

    def decorate(step: Callable) -> Callable:
        op.step = step
        return step

    return decorate


def kind_of(tensors: Iterable[Any]) -> list | None:
    """All that checks of ``tensors`` and the choice of an implementation depend on, except numbers.

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
    kind: list[Any] = [_environment.get(name) for name in _names]
    if kind[-1] is not None:
        return None
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or x.is_neg() or torch._C._functorch.is_legacy_batchedtensor(x):
            return None
        kind.append((x.dtype, x.shape))
    return kind
