"""What every causal chunk form needs: cutting a sequence into chunks, sums over earlier chunks, the compute dtype."""

import contextlib
from typing import ContextManager, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Up to so many chunks, a CPU forms sums over them as a product.
_FEW_CHUNKS = 32


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for a float64 tensor: sums, states and normalisers are never half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def autocast_off(tensor: Tensor) -> ContextManager:
    """A context in which autocast does not turn the products of ``tensor``'s device into half precision."""
    device = tensor.device.type
    # The meta device, on which models are measured without memory, knows no autocast and refuses the question. (Asking
    # torch.amp.is_autocast_available would break the graph of torch.compile in torch 2.6.)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device_type=device, enabled=False)


def autocast_remains(x: Tensor) -> bool:
    """Whether products of ``x`` become half precision for lack of ``autocast_off`` in TorchScript; not of float64 ones.

    TorchScript cannot ask whether autocast is on either (torch 2.15 crashes), so that a product is tried.
    """
    if not torch.jit.is_scripting():
        return False
    zero = torch.zeros([1, 1], dtype=x.dtype, device=x.device)
    return torch.mm(zero, zero).dtype != x.dtype


def zero_padding(x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
    """``x`` (B, H, n, d) with zeros where ``padding_mask`` (B, n; True = padding) says so, NaN and inf included."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None, :, None], 0.0)


def split_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """(B, H, n, ...) -> (B, H, G, C, ...) with G = ceil(n / C), zeros appended to fill the last chunk."""
    batch, heads, length = x.shape[:3]
    missing = -length % chunk_size
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 3) + [0, missing])
    return x.reshape(batch, heads, (length + missing) // chunk_size, chunk_size, *x.shape[3:])


def from_here(x: Tensor) -> Tensor:
    """Sums over the last dimension from each place on, (..., C) -> (..., C)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def carry_sums(chunk_sums: Tensor, initial: Optional[Tensor], reverse: bool = False) -> Tuple[Tensor, Tensor]:
    """Running sums over chunks: (B, H, G, ...) -> up to before each chunk (B, H, G, ...) and over all (B, H, ...).

    ``initial`` (B, H, ...) is the sum over everything before the first chunk, zero when None. With ``reverse``, sums
    run from the last chunk to the first: each chunk gets what is behind it, and ``initial`` is behind the last.
    """
    groups = chunk_sums.shape[2]
    if chunk_sums.device.type == "cpu" and not torch.compiler.is_compiling() and groups <= _FEW_CHUNKS:
        return _carry_few_sums(chunk_sums, initial, reverse)
    if reverse:
        carried, total = carry_sums(chunk_sums.flip(2), initial)
        return carried.flip(2), total
    inclusive = chunk_sums.cumsum(2)
    if initial is not None:
        inclusive = inclusive + initial.unsqueeze(2)
    first = torch.zeros_like(inclusive[:, :, :1]) if initial is None else initial.unsqueeze(2)
    # (B, H, 1, ...), (B, H, G-1, ...) -> (B, H, G, ...)
    return torch.cat([first.to(inclusive.dtype), inclusive[:, :, :-1]], dim=2), inclusive[:, :, -1]


def _carry_few_sums(chunk_sums: Tensor, initial: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    """The same as a product with a triangle of ones, which a CPU does in a third of the time; O(G²)."""
    batch, heads, groups = chunk_sums.shape[:3]
    triangle = chunk_sums.new_ones(groups, groups)
    triangle = (triangle.triu(1) if reverse else triangle.tril(-1)).expand(batch * heads, -1, -1)
    carried = torch.bmm(triangle, chunk_sums.flatten(3).flatten(0, 1))  # (B H, G, ...)
    if initial is not None:
        carried.add_(initial.flatten(2).flatten(0, 1).unsqueeze(1))  # (B, H, ...) -> (B H, 1, ...)
    carried, last = carried.view_as(chunk_sums), 0 if reverse else -1
    return carried, carried[:, :, last] + chunk_sums[:, :, last]
