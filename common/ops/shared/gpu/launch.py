"""The host's side of all kernels: tuning, the device they run on, the strides they take."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dispatch import interpreted


def tuned(key: list[str]) -> Callable[[Any], Any]:
    """A decorator that times four and eight warps once for each value of the arguments in ``key``.

    A configuration that does not fit the device is passed over. A kernel must not read what it writes, because it is
    run several times. Without a GPU nothing can be timed, and the kernel stays as it is.
    """
    if not torch.cuda.is_available() or interpreted():
        return lambda kernel: kernel
    import triton  # here, since host sides are imported where there is no Triton

    # Few, as each is compiled for every kernel. One stage: tiles of float32 leave no shared memory for a second.
    configs = [triton.Config({}, num_warps=warps, num_stages=1) for warps in (8, 4)]
    return triton.autotune(configs=configs, key=key)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels are launched on the device of ``x``; Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows(x: Tensor) -> Tensor:
    """``x`` (B, H, n, c) in any layout whose channels stand side by side; a copy where they do not."""
    return x if x.stride(3) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of batch, head and token of x (B, H, n, c), as kernels take them."""
    return x.stride(0), x.stride(1), x.stride(2)


def precision(x: Tensor) -> str:
    """The precision of products, all of float32 operands: exact for float32 inputs, TF32's 10 bits for half precision.

    TF32 has float32's range and more bits than a bfloat16 input, so that nothing computed inside overflows.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32"


def at_least_16(channels: int) -> int:
    """The smallest power of two that holds ``channels`` and that a product of tiles takes."""
    return max(16, 1 << (channels - 1).bit_length())


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)
