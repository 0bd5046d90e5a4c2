"""Causal sums in chunks, in PyTorch's differentiable functions.

Legend: B batch, H heads, n tokens, f features of a query or key, e channels of a value, C tokens of a chunk, G chunks.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .channel_decay import channel_decayed_sums
from .chunks import carry_decayed_sums, carry_sums, chunk_length, decay_between, split_chunks
from .state import State


def sums_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, state: State | None, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor, State]:
    """``feature_sums.causal_sums`` by one C x C product inside each chunk and one f x e sum across chunks.

    O(n (C + e) f) time, O(n C + (n / C) f e) memory; with a decay for each feature, the cost of
    ``channel_decayed_sums``.
    """
    length, size = q.shape[2], chunk_length(chunk_size, q.shape[2])
    if log_decay is not None and log_decay.dim() == 4:
        return _channel_sums(q, k, v, chunk_size, state, log_decay)
    q, k, v = (split_chunks(x, size) for x in (q, k, v))  # (B, H, G, C, channels)
    scores, carry = q @ k.transpose(-2, -1), carry_sums  # (B, H, G, C, C)
    if log_decay is None:
        scores = scores.tril()
    else:
        log_decay = split_chunks(log_decay, size)  # (B, H, G, C)
        inside, since_start = decay_between(log_decay), log_decay.cumsum(-1).exp()
        # Earlier sums decay until a query of the chunk reads them, and the chunk's own keys decay until its end.
        scores, q, k = scores * inside, q * since_start.unsqueeze(-1), k * inside[..., -1, :].unsqueeze(-1)
        carry = partial(carry_decayed_sums, log_decay=log_decay.sum(-1))
    earlier_k, sum_k = carry(k.sum(3), None if state is None else state["sum_k"])
    earlier_kv, sum_kv = carry(k.transpose(-2, -1) @ v, None if state is None else state["sum_kv"])
    weights = scores.sum(-1, keepdim=True) + q @ earlier_k.unsqueeze(-1)  # (B, H, G, C, 1)
    values = scores @ v + q @ earlier_kv
    # (B, H, G, C, ...) -> (B, H, n, ...)
    values, weights = (x.flatten(2, 3)[:, :, :length] for x in (values, weights))
    # A slice that is saved for the backward pass fixes the length of a compiled graph (torch 2.14): inductor changes
    # its layout, and torch treats the new strides as constants.
    return values, weights.contiguous(), {"sum_k": sum_k, "sum_kv": sum_kv}


def _channel_sums(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, state: State | None, log_decay: Tensor
) -> tuple[Tensor, Tensor, State]:
    """``sums_in_chunks`` with ``log_decay`` (B, H, n, f)."""
    # The sum of the weights is an additional channel of v with all values 1.
    v = F.pad(v, (0, 1), value=1.0)
    initial = None if state is None else torch.cat([state["sum_kv"], state["sum_k"].unsqueeze(-1)], dim=-1)
    out, sums = channel_decayed_sums(q, k, v, log_decay, chunk_size, initial)
    return out[..., :-1], out[..., -1:], {"sum_k": sums[..., -1], "sum_kv": sums[..., :-1]}
