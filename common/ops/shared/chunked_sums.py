"""Causal sums in chunks, in PyTorch's differentiable functions.

Legend: B batch, H heads, n tokens, f features of a query or key, e channels of a value, C tokens of a chunk, G chunks,
b tokens of a block, a power of two.

With a decay for each feature, Σ_c q_ic k_jc exp(Σ_(j < t <= i) log_decay_tc) v_j, the scores of a chunk are not a
product of queries and keys times one matrix. They would be products of q_i P_i and k_j / P_j with cumulative products
P, but 1 / P_j overflows. So a chunk is halved repeatedly: the queries of a second half see the keys of the first half
across the border between them. The decays from a key to the border, and from the border to a query, are products of
factors of at most 1, each formed separately. All pairs of one level are one batched product.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

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


def channel_decayed_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk_size: int, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Σ_(j <= i) Σ_c q_ic k_jc exp(Σ_(j < t <= i) log_decay_tc) v_j (B, H, n, e), and the final sum (B, H, f, e).

    q, k and ``log_decay`` (B, H, n, f), the latter at most 0 and finite, v (B, H, n, e). ``initial`` (B, H, f, e) is
    the sum before the first token, zero when None. C is ``chunk_size`` rounded up to a power of two. O(n (C + e) f)
    time, O(n (f + e) log C + (n / C) f e) memory. ``feature_sums.decayed_sums`` computes the same by kernels on a CPU.
    """
    if q.shape[2] == 1 and initial is not None:
        last = torch.addcmul(log_decay.exp().transpose(-2, -1) * initial, k.transpose(-2, -1), v)
        return q @ last, last
    if initial is None:
        initial = v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    size = _chunk_length(chunk_size, q.shape[2])
    length = q.shape[2]
    q, k, v, log_decay = (split_chunks(x, size) for x in (q, k, v, log_decay))  # (B, H, G, C, channels)
    inside, since_start, until_end = _within_chunks(q, k, v, log_decay.exp())
    # Earlier sums decay until a query of the chunk reads them, and the chunk's own keys decay until its end.
    chunk_sums = (k * until_end).transpose(-2, -1) @ v  # (B, H, G, f, e)
    earlier, last = carry_decayed_sums(chunk_sums, initial, log_decay.sum(3))
    out = inside + (q * since_start) @ earlier
    return out.flatten(2, 3)[:, :, :length], last


def _chunk_length(chunk_size: int, length: int) -> int:
    """The smallest power of two that is at least ``chunk_size``, or at least ``length`` if that is smaller."""
    size = 1
    while size < chunk_size and size < length:
        size *= 2
    return size


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over keys of a query's own chunk (B, H, G, C, e), and the products of ``decay`` to the chunk's ends.

    q, k and ``decay`` (B, H, G, C, f), v (B, H, G, C, e). The products (B, H, G, C, f) are from the start of the chunk
    to a token, including its own decay, and from a token to the end, without its own.
    """
    out = (q * k).sum(-1, keepdim=True) * v  # a token does not decay before it is read
    # Blocks of b tokens, at first of one: (B, H, G, C / b, b, channels)
    q, k, v, out, since_start = (x.unsqueeze(-2) for x in (q, k, v, out, decay))
    until_end = torch.ones_like(since_start)
    while q.shape[3] > 1:
        (_, queries), (keys, _), (values, _) = _halves(q), _halves(k), _halves(v)
        (first, second), (before, since_border), (until_border, after) = map(_halves, (out, since_start, until_end))
        scores = (queries * since_border) @ (keys * until_border).transpose(-2, -1)  # (B, H, G, C / 2b, b, b)
        out = torch.cat([first, second + scores @ values], dim=-2)
        since_start = torch.cat([before, since_border * before[..., -1:, :]], dim=-2)
        until_end = torch.cat([until_border * since_border[..., -1:, :], after], dim=-2)
        q, k, v = (x.reshape(*x.shape[:3], x.shape[3] // 2, 2 * x.shape[4], x.shape[5]) for x in (q, k, v))
    return out.squeeze(3), since_start.squeeze(3), until_end.squeeze(3)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of blocks: (B, H, G, C / b, b, c) -> (B, H, G, C / 2b, b, c) twice."""
    return x[:, :, :, 0::2], x[:, :, :, 1::2]
