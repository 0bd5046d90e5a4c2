"""Moving the real tokens of every row to its front, so that chunks and positions count real tokens alone."""

from typing import Optional

import torch
from torch import Tensor


def real_positions(padding_mask: Tensor) -> Tensor:
    """How many real tokens stand before each token: (B, n), True = padding -> int64 (B, n); O(n)."""
    real = ~padding_mask
    return real.cumsum(1) - real.long()


def real_first(padding_mask: Optional[Tensor]) -> Optional[Tensor]:
    """The order (B, n) that puts each row's real tokens first, both kinds in their old order; None for no mask.

    ``padding_mask`` is bool (B, n), True = padding, on any side or in between. O(n).
    """
    if padding_mask is None:
        return None
    position = real_positions(padding_mask)
    behind = (~padding_mask).sum(1, keepdim=True) + real_positions(~padding_mask)
    places = torch.where(padding_mask, behind, position)  # where each token goes
    return invert(places)


def invert(order: Tensor) -> Tensor:
    """The order (B, n) that undoes ``order``; O(n)."""
    index = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(1, order, index)


def take(x: Tensor, order: Optional[Tensor]) -> Tensor:
    """Tokens of x (B, H, n, c) in ``order`` (B, m) -> (B, H, m, c); x itself for None. O(m c)."""
    if order is None:
        return x
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def put_back(x: Tensor, order: Optional[Tensor]) -> Tensor:
    """The inverse of ``take`` for a whole row: x (B, H, n, c) -> (B, H, n, c)."""
    return x if order is None else take(x, invert(order))
