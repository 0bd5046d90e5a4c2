"""Padding: moving each row's real tokens to its front, so that chunks and positions count only these; clearing it."""

import torch
from torch import Tensor

from .tracing import runs_eagerly


def real_positions(padding_mask: Tensor) -> Tensor:
    """The number of real tokens before each token: (B, n), True = padding -> int64 (B, n); O(n)."""
    real = ~padding_mask
    return real.cumsum(1) - real.long()


def padding_or_none(padding_mask: Tensor) -> Tensor | None:
    """``padding_mask``, or None if it hides nothing and its values may be read: on a CPU, without tracing."""
    may_look = padding_mask.device.type == "cpu" and runs_eagerly(padding_mask)
    return None if may_look and not bool(padding_mask.any()) else padding_mask


def real_first(padding_mask: Tensor | None) -> Tensor | None:
    """The order (B, n) that puts each row's real tokens first and padding last, otherwise unchanged; None for no mask.

    ``padding_mask`` is bool (B, n), True = padding, on any side or in between. O(n).
    """
    if padding_mask is None:
        return None
    position = real_positions(padding_mask)
    padding_place = (~padding_mask).sum(1, keepdim=True) + real_positions(~padding_mask)
    places = torch.where(padding_mask, padding_place, position)  # where each token goes
    return invert(places)


def invert(order: Tensor) -> Tensor:
    """The order (B, n) that undoes ``order``; O(n)."""
    index = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(1, order, index)


def take(x: Tensor, order: Tensor | None) -> Tensor:
    """Tokens of x (B, H, n, c) in ``order`` (B, m) -> (B, H, m, c); x itself for None. O(m c)."""
    if order is None:
        return x
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def put_back(x: Tensor, order: Tensor | None) -> Tensor:
    """The inverse of ``take`` for a whole row: x (B, H, n, c) -> (B, H, n, c)."""
    return x if order is None else take(x, invert(order))


def either_mask(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Padding by either of two masks (B, n), True = padding; None is no padding. O(n)."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask | other


def both_masks(
    q: Tensor, k: Tensor, query_padding_mask: Tensor | None, key_padding_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The masks of k (B, H, m, d) and of q (B, H, n, d), in this order; both are None, or neither.

    A missing one is a mask (B, m) or (B, n) without padding. True = padding.
    """
    if key_padding_mask is None and query_padding_mask is None:
        return None, None
    if key_padding_mask is None:
        key_padding_mask = query_padding_mask.new_zeros(k.shape[0], k.shape[2])
    if query_padding_mask is None:
        query_padding_mask = key_padding_mask.new_zeros(q.shape[0], q.shape[2])
    return key_padding_mask, query_padding_mask


def zero_padding(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``x`` (B, H, n, d) with zeros at padding (B, n; True = padding), also where it is NaN or inf."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None, :, None], 0.0)


def zero_padded_tokens(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Tokens x (B, n, D) before their projection, with zeros at padding (B, n; True = padding), as ``zero_padding``."""
    return x if padding_mask is None else zero_padding(x.unsqueeze(1), padding_mask).squeeze(1)
