"""When kernels are used, and what happens where they cannot be.

Kernels take plain CUDA tensors in float32, float16 or bfloat16. They are left to the PyTorch forms: other devices and
dtypes (float64), torch.compile, torch.export and tracing (which would see through no kernel; inductor fuses the PyTorch
forms itself), torch.func's transforms, forward-mode gradients and tensor subclasses. ``LINEARTIME_TRITON=0`` turns all
kernels off. Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported) takes the place of a GPU: kernels
then run on CPU tensors, slowly, which is how they are tested.
"""

import functools
import importlib
import os
import warnings
from types import ModuleType
from typing import Any, Callable, Set, Tuple

import torch
from torch import Tensor

from ..eager import runs_eagerly

#: The environment variable that turns kernels off.
VARIABLE = "LINEARTIME_TRITON"
#: The oldest Triton they are written for, that of torch 2.6.
OLDEST_TRITON = (3, 2)
#: Widest q and k, in channels: the scores of a tile are one product, which holds all of them at once.
MAX_CHANNELS = 128

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOT_ERRORS_OF_A_KERNEL = (torch.OutOfMemoryError, ValueError)
_failed: Set[str] = set()  # names whose kernels are not tried again


def switched_on() -> bool:
    """What ``LINEARTIME_TRITON`` says: "1" (the default) or "0"; raises ValueError for anything else."""
    given = os.environ.get(VARIABLE, "1")
    if given not in ("0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {given!r}; allowed: '0' (off) and '1' (on, the default)"
        )
    return given == "1"


def interpreted() -> bool:
    """Whether Triton's interpreter, which runs kernels on CPU tensors, is asked for."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def flow_attention_applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal Flow-Attention of q, k (B, H, n, d) and v (B, H, n, e) goes through kernels: d up to 128."""
    return applies("flow_attention", q, k, v) and q.shape[3] <= MAX_CHANNELS


def mixed_chunk_attention_applies(q_quad: Tensor, v: Tensor, kernel: str, first: bool) -> bool:
    """Whether mixed chunk attention goes through kernels: s up to 128, relu² or Laplace, and no special first token.

    q_quad (B, H, n, s), v (B, H, n, e); ``first``: whether first tokens attend in a way of their own.
    """
    covered = kernel in ("relu2", "laplace") and not first and q_quad.shape[3] <= MAX_CHANNELS
    return applies("mixed_chunk_attention", q_quad, v) and covered


def applies(name: str, *tensors: Tensor) -> bool:
    """Whether kernels can be used for ``tensors``, those of ``name`` have not failed, and the user has not said no.

    Raises:
        ValueError: ``LINEARTIME_TRITON`` is neither 0 nor 1.
    """
    # First, as a graph that is being traced must not depend on the environment.
    if not runs_eagerly(*tensors):
        return False
    if not switched_on() or name in _failed:
        return False
    on_device = all(x.is_cuda for x in tensors) or (interpreted() and all(x.device.type == "cpu" for x in tensors))
    return on_device and all(_is_plain(x) for x in tensors) and _has_triton()


def _is_plain(x: Tensor) -> bool:
    """Whether ``x`` is a tensor of a dtype kernels take, and not of a subclass."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.dtype in _DTYPES and x.numel() > 0


@functools.lru_cache(maxsize=None)
def _has_triton() -> bool:
    """Whether a Triton that is new enough can be imported; if not, a warning, once."""
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
        f"{problem}; the PyTorch forms are used. For kernels: pip install 'triton>={oldest}'. "
        f"To use the PyTorch forms without this warning: {VARIABLE}=0",
        stacklevel=4,
    )
    return False


def _numbers(version: str) -> Tuple[int, ...]:
    """Major and minor of "3.2.0+git1234"."""
    return tuple(int(number) for number in version.split(".")[:2])


def attempt(name: str, function: str, plain: Callable[..., Any], arguments: Tuple[Any, ...]) -> Any:
    """``common.ops.triton.<name>.<function>(*arguments)``; where it fails ``plain(*arguments)``. See ``guarded``."""
    return guarded(name, lambda: getattr(_kernels_of(name), function)(*arguments), lambda: plain(*arguments))


def guarded(name: str, kernel: Callable[[], Any], plain: Callable[[], Any]) -> Any:
    """``kernel()``; where it fails, a warning, once, and ``plain()`` from then on for all kernels of ``name``.

    A kernel that a combination of GPU, driver and Triton cannot compile must not end a training that PyTorch can do.
    Lack of memory and a ValueError are no such failure and are raised.
    """
    if name not in _failed:
        try:
            return kernel()
        except _NOT_ERRORS_OF_A_KERNEL:
            raise
        except Exception as error:
            _give_up(name, error)
    return plain()


def _kernels_of(name: str) -> ModuleType:
    """The module ``common.ops.triton.<name>``, which imports Triton."""
    return importlib.import_module(f"{__package__}.{name}")


def _give_up(name: str, error: BaseException) -> None:
    """Warn that the kernels of ``name`` have failed with ``error``, and use them no more in this process."""
    _failed.add(name)
    reason = (str(error).strip().splitlines() or [""])[0]
    warnings.warn(
        f"Triton kernels of {name} failed ({type(error).__name__}: {reason}); its PyTorch form is used from now on. "
        f"To use that without this warning: {VARIABLE}=0",
        stacklevel=4,
    )
