"""Random tensors and padding masks for the tests of the core."""

from typing import Optional, Tuple

import torch
from torch import Tensor


def qkv(
    n: int,
    m: Optional[int] = None,
    *,
    batch: int = 2,
    heads: int = 2,
    d: int = 5,
    e: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
) -> Tuple[Tensor, Tensor, Tensor]:
    """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e), leaves that want gradients; m is n when None."""
    generator = torch.Generator().manual_seed(seed)
    m = n if m is None else m
    shapes = ((batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, e))
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v = ((x * scale).to(dtype).requires_grad_() for x in tensors)
    return q, k, v


def doubled(*tensors: Tensor) -> Tuple[Tensor, ...]:
    """The same numbers as new float64 leaves, for the reference of a less precise input."""
    return tuple(x.detach().double().requires_grad_() for x in tensors)


#: Where padding can stand, by name; see ``padding``.
SIDES = ("none", "left", "right", "both", "holes", "all")


def padding(side: str, batch: int, tokens: int) -> Optional[Tensor]:
    """Bool (batch, tokens), True = padding, another amount in each row; "all" leaves one row without a real token."""
    if side == "none":
        return None
    position = torch.arange(tokens).expand(batch, tokens)
    amount = (torch.arange(batch)[:, None] + 1) * tokens // (2 * batch + 2)
    if side == "left":
        return position < amount
    if side == "right":
        return position >= tokens - amount
    if side == "both":
        return (position < amount // 2) | (position >= tokens - (amount + 1) // 2)
    if side == "holes":
        return (position + torch.arange(batch)[:, None]) % 3 == 1
    mask = position >= tokens - amount
    mask[0] = True
    return mask
