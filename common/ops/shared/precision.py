"""The dtype for sums, and a context in which autocast does not round products to half precision."""

import contextlib

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for a float64 tensor: sums, states and normalisers are never half precision."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the call if there is nothing to convert: in decoding, calls take most of the time."""
    return x if x.dtype == dtype else x.to(dtype)


def autocast_off(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast does not turn products on ``tensor``'s device into half precision."""
    device = tensor.device.type
    # The meta device, on which models are measured without memory, has no autocast and raises for the query. (Calling
    # torch.amp.is_autocast_available would break the graph of torch.compile in torch 2.6.)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device_type=device, enabled=False)


def autocast_remains(x: Tensor) -> bool:
    """Whether autocast rounds products of ``x`` inside TorchScript, which has no ``autocast_off``; never for float64.

    TorchScript cannot query whether autocast is on either (torch 2.15 crashes), so a small product is computed.
    """
    if not torch.jit.is_scripting():
        return False
    zero = torch.zeros([1, 1], dtype=x.dtype, device=x.device)
    return torch.mm(zero, zero).dtype != x.dtype
