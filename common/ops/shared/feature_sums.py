"""The core of linear attention for precomputed features: sums of values, weighted by products of features.

Legend: B batch, H heads, n queries, m keys, f features of a query or key, e channels of a value, C tokens of a chunk,
G chunks. A mechanism computes the features, 0 at padding, and divides by the sum of the weights in its own way.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .channel_decay import channel_decayed_sums
from .chunks import carry_decayed_sums, carry_sums, chunk_length, decay_between, split_chunks
from .padding import zero_padding
from .state import State, state_of_source
from .tracing import runs_eagerly


def state_shapes(features: int, v: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state of ``causal_sums``, for v (B, H, n, e)."""
    vector = (*v.shape[:2], features)
    return {"sum_k": vector, "sum_kv": (*vector, v.shape[3])}


def full_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j (q_i·k_j) v_j (B, H, n, e) and Σ_j q_i·k_j (B, H, n, 1) over all keys; O(n f e).

    q (B, H, n, f), k (B, H, m, f), v (B, H, m, e).
    """
    sum_k, sum_kv = _sums_over_keys(k, v)
    return _read(q, sum_k, sum_kv)


def sums_of_source(k: Tensor, v: Tensor, padding_mask: Tensor | None) -> State:
    """State of a source, ``sum_k`` (B, H, f) and ``sum_kv`` (B, H, f, e), from features k (B, H, m, f) of its tokens.

    v (B, H, m, e) may have any dtype and any values at padding; ``padding_mask`` (B, m), True = padding. O(m f e) time.
    """
    sum_k, sum_kv = _sums_over_keys(k, zero_padding(v.to(k.dtype), padding_mask))
    return {"sum_k": sum_k, "sum_kv": sum_kv}


def read_source(q: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """``full_sums`` of features q (B, H, n, f) over the source of ``state``; O(n f e), whatever its length.

    Raises:
        ValueError: ``state`` does not fit.
    """
    state = state_of_source(state, ("sum_k",), q)
    return _read(q, state["sum_k"], state["sum_kv"])


def _sums_over_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.sum(2), k.transpose(-2, -1) @ v


def _read(q: Tensor, sum_k: Tensor, sum_kv: Tensor) -> tuple[Tensor, Tensor]:
    return q @ sum_kv, (q * sum_k.unsqueeze(2)).sum(-1, keepdim=True)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, state: State | None, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor, State]:
    """Σ_(j <= i) (q_i·k_j) v_j (B, H, n, e), Σ_(j <= i) q_i·k_j (B, H, n, 1), and the state after the tokens.

    q, k (B, H, n, f), v (B, H, n, e). The sums continue those of ``state``, ``sum_k`` and ``sum_kv`` in the dtype of
    the features, or start from 0 if it is None. ``log_decay``, at most 0 and finite, is (B, H, n): before token t is
    added, all sums are multiplied by exp(log_decay_t); or (B, H, n, f): the sums of each feature c by
    exp(log_decay_tc). One C x C product inside each chunk, one f x e sum across chunks: O(n (C + e) f) time, O(n C +
    (n / C) f e) memory; with a decay for each feature, the cost of ``channel_decayed_sums``.
    """
    length, size = q.shape[2], chunk_length(chunk_size, q.shape[2])
    if length == 1 and state is not None:
        return _step(q, k, v, state, log_decay)
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
    """``causal_sums`` with ``log_decay`` (B, H, n, f)."""
    # The sum of the weights is an additional channel of v with all values 1.
    v = F.pad(v, (0, 1), value=1.0)
    initial = None if state is None else torch.cat([state["sum_kv"], state["sum_k"].unsqueeze(-1)], dim=-1)
    out, sums = channel_decayed_sums(q, k, v, log_decay, chunk_size, initial)
    return out[..., :-1], out[..., -1:], {"sum_k": sums[..., -1], "sum_kv": sums[..., :-1]}


def _step(q: Tensor, k: Tensor, v: Tensor, state: State, log_decay: Tensor | None) -> tuple[Tensor, Tensor, State]:
    """``causal_sums`` of one token after ``state``, in the few operations that one token needs; O(f e)."""
    sum_k, sum_kv, add = state["sum_k"], state["sum_kv"], torch.addcmul
    if log_decay is None:
        sum_k = sum_k + k.squeeze(2)
    else:
        decay = (log_decay if log_decay.dim() == 3 else log_decay.squeeze(2)).exp()  # (B, H, 1) or (B, H, f)
        sum_k, sum_kv = torch.addcmul(k.squeeze(2), sum_k, decay), sum_kv * decay.unsqueeze(-1)
        if runs_eagerly(k, v, sum_kv):
            add = Tensor.addcmul_  # in place, into a tensor made here: a new one would be a tenth of the step's time
    sum_kv = add(sum_kv, k.transpose(-2, -1), v)
    return *_read(q, sum_k, sum_kv), {"sum_k": sum_k, "sum_kv": sum_kv}
