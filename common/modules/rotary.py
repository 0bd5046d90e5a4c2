"""Rotary positions of queries and keys (RoFormer), counted among the real tokens."""

from typing import Any

import torch
from torch import Tensor

from ..ops.shared.checks import ArgumentError
from ..ops.shared.padding import real_positions
from ..ops.shared.precision import in_dtype
from ..ops.shared.segments import find_documents
from ..ops.shared.state import State
from ..ops.shared.tracing import runs_eagerly


def check_even(argument: str, channels: int) -> None:
    """Raise ValueError unless ``channels`` is even, so that its two halves can be rotated."""
    if channels % 2:
        raise ArgumentError(f"`{argument}` is {channels}; allowed with rotary positions: an even number")


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of the two *halves* of x (RoFormer; FLASH's layout), in x's dtype.

    x (..., n, s) and integer positions (n,) or any shape that broadcasts to (..., n): channels i and i + s/2 are
    rotated by position · 10000^(-i / (s/2)). O(size of x).

    Raises:
        ValueError: an odd number of channels.
    """
    check_even("the number of channels", x.shape[-1])
    return rotate_by(x, *cos_and_sin(positions, x.shape[-1], x.dtype))


def cos_and_sin(positions: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``rotate_by``: (..., n, channels / 2) each, in at least float32."""
    half = channels // 2
    # Angles in half precision would have errors of several full turns.
    dtype = torch.promote_types(dtype, torch.float32)
    frequency = 10000.0 ** (torch.arange(0, -half, -1, device=positions.device, dtype=dtype) / half)
    angle = positions[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate`` with the results of ``cos_and_sin``; only these are saved for the backward pass."""
    if not runs_eagerly(x):
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return _Rotation.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate_by`` without a graph, in fewer passes over memory."""
    first, second = in_dtype(x, cos.dtype).chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=cos.dtype)
    to_first, to_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return in_dtype(out, x.dtype)


class _Rotation(torch.autograd.Function):
    """``rotate_by``; its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_by(grad_out, cos, -sin), None, None


def token_positions(x: Tensor, padding_mask: Tensor | None, count: Tensor | None = None) -> Tensor:
    """Positions among the real tokens of a sequence, for x (B, H, n, c): (n,), or (B, 1, n) if rows may differ.

    ``padding_mask`` is bool (B, n), True = padding; ``count`` (B,) tokens came before x. O(n).
    """
    if x.shape[2] == 1 and padding_mask is None and count is not None:
        return count[:, None, None]
    positions = torch.arange(x.shape[2], device=x.device)
    if padding_mask is None and count is None:
        return positions
    positions = positions[None] if padding_mask is None else real_positions(padding_mask)  # (1, n) or (B, n)
    return (positions if count is None else positions + count[:, None])[:, None]


def document_positions(
    x: Tensor, padding_mask: Tensor | None, count: Tensor | None, segment_ids: Tensor | None, state: State | None
) -> Tensor:
    """``token_positions`` within each document of ``segment_ids`` (B, n), if given: (n,) or (B, 1, n).

    x is (B, H, n, c). ``count`` (B,) tokens of the last document in ``state`` came before x.

    Raises:
        ValueError: ``segment_ids`` that do not fit x, or the state.
    """
    if segment_ids is None:
        return token_positions(x, padding_mask, count)
    return find_documents(segment_ids, padding_mask, state, x).positions(count)[:, None]
