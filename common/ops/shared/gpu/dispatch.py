"""When Triton kernels are used, and the fallback if they fail. Independent of Triton and of all mechanisms.

Kernels support CUDA tensors in float32, float16 or bfloat16. Plain PyTorch is used for everything else: other devices
and dtypes (float64), torch.export and tracing (to which kernels are opaque), torch.func's transforms, forward-mode
gradients and tensor subclasses. torch.compile calls kernels as operators (``operators``). Before their first use they
are compared with plain PyTorch (``first_use``). ``LINEARTIME_TRITON=0`` turns all kernels off, ``LINEARTIME_TRITON=1``
turns them on without that. Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported) takes the place of a
GPU: kernels then run on CPU tensors, slowly, which is how they are tested.
"""

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tracing import is_capturing, is_compiled, runs_eagerly
from .first_use import FirstUse, compare, right
from .launch import interpreted, wait_for

#: The environment variable that turns kernels off, or on without a check.
VARIABLE = "LINEARTIME_TRITON"
#: The oldest supported Triton, that of torch 2.6.
OLDEST_TRITON = (3, 2)
#: Maximum number of channels of q and k: the scores of a tile are one product over all channels at once.
MAX_CHANNELS = 128

#: Names whose kernels have failed in this process and are not tried again, unless the name is removed.
failed: set[str] = set()

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOT_ERRORS_OF_A_KERNEL = (torch.OutOfMemoryError, ValueError)


def switched_on() -> bool:
    """Whether ``LINEARTIME_TRITON`` is "1", empty or not set, and not "0"; ValueError for anything else."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {value!r}; allowed: '0' (off), '1' (on, without a check), or none"
        )
    return value != "0"


def applies(name: str, *tensors: Tensor) -> bool:
    """Whether kernels can be used for ``tensors``, those of ``name`` have not failed, and they are not switched off.

    Each mechanism adds its own limits in an ``applies`` next to its kernels.

    Raises:
        ValueError: ``LINEARTIME_TRITON`` is neither 0 nor 1.
    """
    if not torch.compiler.is_compiling() and tensors[0].is_cpu and not interpreted():
        switched_on()  # an error, as on a GPU
        return False  # first, because kernels for CPUs come next in each decoding step
    # torch.compile calls kernels as operators, but not inside torch.func's transforms.
    if not runs_eagerly(*tensors) and (not is_compiled() or torch._C._are_functorch_transforms_active()):
        return False
    on_cpu, on_gpu = all(x.device.type == "cpu" for x in tensors), all(x.is_cuda for x in tensors)
    return (on_cpu or on_gpu) and all(_has_kernel_dtype(x) for x in tensors) and _usable(name, on_cpu)


def _usable(name: str, on_cpu: bool) -> bool:
    """Whether kernels of ``name`` can run there, are switched on and have not failed, and Triton is installed."""
    return (interpreted() or not on_cpu) and switched_on() and name not in failed and has_triton()


# torch.compiler.assume_constant_result, which would import all of torch.compile and Triton: asked once for a graph.
_usable._dynamo_marked_constant = True


def _has_kernel_dtype(x: Tensor) -> bool:
    """Whether ``x`` is a tensor of a dtype that kernels support, not empty and not of a subclass."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.dtype in _DTYPES and x.numel() > 0


@functools.cache
def has_triton() -> bool:
    """Whether a Triton of at least ``OLDEST_TRITON`` can be imported; if not, a warning, once.

    The answer is remembered for the process, until ``has_triton.cache_clear()``.
    """
    oldest = ".".join(map(str, OLDEST_TRITON))
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        problem = f"Triton cannot be imported ({error})"
    else:
        if _numbers(version) >= OLDEST_TRITON:
            return True
        problem = f"Triton {version} is too old"
    warnings.warn(
        f"{problem}; plain PyTorch is used. For kernels: pip install 'triton>={oldest}'. "
        f"To use plain PyTorch without this warning: {VARIABLE}=0",
        stacklevel=4,
    )
    return False


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor of "3.2.0+git1234"."""
    return tuple(int(number) for number in version.split(".")[:2])


def guarded(
    name: str, kernel: Callable[[], Any], fallback: Callable[[], Any], first_use: FirstUse | None = None
) -> Any:
    """``kernel()``; if it fails, warn once and use ``fallback()`` from then on for all kernels of ``name``.

    The fallback is plain PyTorch. A kernel that a combination of GPU, driver and Triton cannot compile must not end a
    training that PyTorch can do.
    With ``first_use`` it is compared with plain PyTorch first, and a difference is a failure; while a CUDA graph is
    captured nothing can be compared, and ``fallback()`` is called. Lack of memory, a ValueError, and an error of
    earlier work on the device are raised: they are not failures of the kernel.
    """
    if name in failed:
        return fallback()
    unchecked = first_use is not None and first_use.key not in right and os.environ.get(VARIABLE) != "1"
    if unchecked:
        if is_capturing(first_use.device):
            return fallback()
        wait_for(first_use.device)
    try:
        if unchecked:
            compare(first_use)
        return kernel()
    except _NOT_ERRORS_OF_A_KERNEL:
        raise
    except Exception as error:
        if type(error).__module__ == "torch.utils.checkpoint":  # its way to end a pass that it repeats
            raise
        _give_up(name, error)
    return fallback()


def _give_up(name: str, error: BaseException) -> None:
    """Warn that the kernels of ``name`` have failed with ``error``, and stop using them in this process."""
    failed.add(name)
    reason = (str(error).strip().splitlines() or [""])[0]
    warnings.warn(
        f"Triton kernels of {name} failed ({type(error).__name__}: {reason}) and are used no more. "
        f"To use plain PyTorch without this warning: {VARIABLE}=0",
        stacklevel=4,
    )
