"""What all kernels share on the host's side: how they are tuned, placed on a device and given their strides."""

import contextlib
from typing import Any, Callable, ContextManager, List, Tuple

import torch
import triton
from torch import Tensor

from .dispatch import interpreted

# Few, as each is compiled for every kernel. One stage: tiles of float32 leave no shared memory for a second.
_CONFIGS = [triton.Config({}, num_warps=warps, num_stages=1) for warps in (8, 4)]


def tuned(key: List[str]) -> Callable[[Any], Any]:
    """A decorator that times four and eight warps once for each value of the arguments in ``key``.

    One that does not fit the device is passed over. A kernel must not read what it writes: it is run several times.
    Without a GPU nothing can be timed, and the kernel stays as it is.
    """
    timed = torch.cuda.is_available() and not interpreted()
    return triton.autotune(configs=_CONFIGS, key=key) if timed else lambda kernel: kernel


def on_device_of(x: Tensor) -> ContextManager:
    """A context in which kernels are launched on the device of ``x``; Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows(x: Tensor) -> Tensor:
    """``x`` (B, H, n, c) in any layout whose channels stand side by side; a copy where they do not."""
    return x if x.stride(3) == 1 else x.contiguous()


def strides(x: Tensor) -> Tuple[int, int, int]:
    """Of batch, head and token, as kernels take them for x (B, H, n, c)."""
    return x.stride(0), x.stride(1), x.stride(2)


def precision(x: Tensor) -> str:
    """Of products, whose operands are float32 in every kernel: exact for float32 inputs, else TF32's 10 bits.

    TF32 has float32's range and more bits than a bfloat16 input, so that nothing computed inside overflows.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32"


def at_least_16(channels: int) -> int:
    """The smallest power of two that holds ``channels`` and that a product of tiles takes."""
    return max(16, triton.next_power_of_2(channels))


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)
