"""Rotary positions of queries and keys (RoFormer), counted among the real tokens."""

import torch
from torch import Tensor

from ..ops.shared.checks import ArgumentError
from ..ops.shared.padding import real_positions


def check_even(argument: str, channels: int) -> None:
    """Raise ValueError unless ``channels`` can be rotated in two halves."""
    if channels % 2:
        raise ArgumentError(f"`{argument}` is {channels}; allowed with rotary positions: an even number")


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of the two *halves* of x (RoFormer; FLASH's layout), in x's dtype.

    x (..., n, s) and integer positions (n,) or any shape that broadcasts to (..., n): channels i and i + s/2 turn by
    position · 10000^(-i / (s/2)). O(size of x).

    Raises:
        ValueError: an odd number of channels.
    """
    check_even("the number of channels", x.shape[-1])
    half = x.shape[-1] // 2
    # Angles in half precision would be wrong by whole turns.
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = positions[..., None].to(dtype) * frequency  # (..., n, s/2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def token_positions(x: Tensor, padding_mask: Tensor | None, count: Tensor | None = None) -> Tensor:
    """Positions among the real tokens of a sequence, for x (B, H, n, c): (n,), or (B, 1, n) where rows may differ.

    ``padding_mask`` is bool (B, n), True = padding; ``count`` (B,) tokens came before x. O(n).
    """
    positions = torch.arange(x.shape[2], device=x.device)
    if padding_mask is None and count is None:
        return positions
    positions = positions[None] if padding_mask is None else real_positions(padding_mask)  # (1, n) or (B, n)
    return (positions if count is None else positions + count[:, None])[:, None]
