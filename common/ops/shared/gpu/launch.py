"""The host's side of all kernels: their warps, the device they run on, the strides they take."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Kernel -> the warps of its programs.
warps_of: dict[str, int] = {}


def interpreted() -> bool:
    """Whether Triton's interpreter, which runs kernels on CPU tensors, is requested."""
    return os.environ.get("TRITON_INTERPRET") == "1"


interpreted._dynamo_marked_constant = True  # asked once for a graph, as in ``dispatch``


def several_on_gpu(x: Tensor) -> bool:
    """Whether x (B, H, n, c) has several tokens and is where kernels for GPUs run."""
    return x.shape[2] > 1 and (x.is_cuda or interpreted())


class _Configured:
    """A kernel with its options of compilation: ``kernel[grid](...)`` launches it."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **self.options)


def with_warps(warps: int = 8) -> Callable[[Any], _Configured]:
    """A decorator that launches a kernel with programs of ``warps`` warps.

    Not triton.autotune: its wrapper takes as long as a launch, of which a short input needs a dozen.
    """

    def configure(kernel: Any) -> _Configured:
        warps_of[f"{kernel.__module__}.{kernel.__name__}"] = warps
        return _Configured(kernel, {} if interpreted() else configuration(warps))

    return configure


def configuration(warps: int) -> dict[str, int]:
    """The options of a compilation. One stage: a second stage needs registers, and all are used."""
    return {"num_warps": warps, "num_stages": 1}


def wait_for(device: torch.device) -> None:
    """Wait until earlier work on a GPU is done; raises an error of this work, if any."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; unreachably large for the interpreter, which runs programs in turn."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels are launched on the device of ``x``; Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows(x: Tensor) -> Tensor:
    """``x`` (B, H, n, c) in any layout with contiguous channels; a copy if they are not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of batch, head and token of x (B, H, n, c), for kernels."""
    return x.stride(0), x.stride(1), x.stride(2)


def at_least_16(channels: int) -> int:
    """The smallest power of two of at least ``channels`` that a product of tiles supports."""
    return max(16, 1 << (channels - 1).bit_length())


def tile_rows(x: Tensor, channels: int) -> int:
    """Tokens of a tile, of at most 8 KiB of x's dtype and, in float32, 32: several must be in registers at once."""
    most = 32 if x.dtype == torch.float32 else 64
    return max(16, min(most, 8192 // (at_least_16(channels) * x.element_size())))


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)
