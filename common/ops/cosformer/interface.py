"""cosFormer: linear attention whose weights decrease with the distance of query and key, as a cosine.

Qin, Sun, Deng, Li, Wei, Lv, Yan, Kong, Zhong, *cosFormer: Rethinking Softmax in Attention*, ICLR 2022, equations 8-11.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import (
    check_both_masks,
    check_choice,
    check_masks,
    check_positive_int,
    check_query_key_value,
)
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_maps import elu_plus_one
from ..shared.feature_sums import means, source_means, state_shapes, step_means, sums_of_source
from ..shared.forgetting import check_log_decay, decay_of_real_tokens
from ..shared.packed import takes_segments
from ..shared.padding import either_mask, real_positions, zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, check_continuation, state_of_sums
from ..shared.token_counts import check_real_positions, check_real_tokens

#: Non-negative feature maps: that of the paper, and a second one in the authors' code.
MAPS = ("relu", "elu+1")
#: Smallest normaliser, as in the authors' code: a query with no weight on any key gives 0 and not NaN.
EPS = 1e-6


@takes_segments("q", "k", "v", "log_decay")
def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_tokens: int,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    phi: str = "relu",
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j s_ij v_j / max(Σ_j s_ij, 1e-6) with s_ij = phi(q_i)·phi(k_j) cos(π/2 (i - j)/M); j <= i when causal.

    q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) ->
    (B, H, n, e) in v's dtype. M = ``max_tokens`` is part of the trained model. i and j count real tokens from 1.
    Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0. Causal, queries and keys are the same tokens:
    both are counted by ``key_padding_mask``, and tokens that it marks give 0. Not causal, they may be tokens of two
    sequences: queries are counted by their own mask, so pass both masks or neither, in self-attention the same twice.
    Cost: O(n d e) time and, causal, O(n C + (n / C) d e) memory with C =
    ``chunk_size``, both with features of 2d channels. ``initial_state`` and ``return_state`` (causal) continue a
    sequence: state ``count`` (B,), ``sum_k`` (B, H, 2d), ``sum_kv`` (B, H, 2d, e), float32. With ``log_decay``
    (causal) the sums decay: s_ij is multiplied by exp(Σ log_decay_t) over j < t <= i. It is (B, H, n), one gate per
    head, or (B, H, n, d), one per channel, for both the cosine and the sine of the channel.

    The authors' code uses the length of the batch as M, so its output depends on padding and on the other sequences of
    the batch, and decoding does not give the same result as the whole sequence.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name or state that does not fit, a state or gates without ``causal``, one mask alone
            without it, or more than ``max_tokens`` real tokens, state included: the cosine would be negative.
    """
    check_positive_int("max_tokens", max_tokens)
    check_choice("phi", phi, MAPS)
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_log_decay(log_decay, causal, q, q.shape[3])
    if not causal:
        check_both_masks(key_padding_mask, query_padding_mask)
    dtype = compute_dtype(q)
    shapes = {"count": (q.shape[0],), **state_shapes(2 * q.shape[3], v)}
    state = state_of_sums(initial_state, shapes, dtype, q)
    before = None if state is None else state["count"]
    count = check_real_tokens(k, key_padding_mask, before, max_tokens)
    if not causal:
        check_real_tokens(q, query_padding_mask, before, max_tokens)
    with autocast_off(q):
        key_turn = _turn(_positions(k, key_padding_mask, before), max_tokens, dtype)
        if causal:
            hidden, query_turn = either_mask(query_padding_mask, key_padding_mask), key_turn
        else:
            hidden, query_turn = query_padding_mask, _turn(_positions(q, query_padding_mask, None), max_tokens, dtype)
        queries = _features(in_dtype(q, dtype), phi, hidden, query_turn)
        keys = _features(in_dtype(k, dtype), phi, key_padding_mask, key_turn)
        values = zero_padding(in_dtype(v, dtype), key_padding_mask)
        log_decay = decay_of_real_tokens(log_decay, key_padding_mask, dtype)
        if log_decay is not None and log_decay.dim() == 4:
            log_decay = torch.cat([log_decay, log_decay], dim=-1)
        sums_options = {"least": EPS, "precision": v.dtype}
        out, sums = means(queries, keys, values, causal, chunk_size, state, log_decay, **sums_options)
    out = out.to(v.dtype)
    return (out, {"count": count, **sums}) if return_state else out


@step_of(cosformer_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    max_tokens: int,
    phi: str,
    log_decay: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, State]:
    """``cosformer_attention`` of one token after ``state``; see ``step_of``."""
    count = check_real_tokens(k, None, state["count"], max_tokens)
    angle = count.to(q.dtype)[:, None, None, None] * (math.pi / (2 * max_tokens))
    queries, keys = _features(torch.cat([q, k], dim=2), phi, None, (angle.cos(), angle.sin())).split(1, dim=2)
    if log_decay is not None and log_decay.dim() == 4:
        log_decay = torch.cat([log_decay, log_decay], dim=-1)
    out, sums = step_means(queries, keys, v, state, log_decay, least=EPS)
    return out, {"count": count, **sums}


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, phi: str, max_tokens: int) -> State:
    """State of a source: ``sum_k`` (B, H, 2d) and ``sum_kv`` (B, H, 2d, e), float32; O(m d e).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. Arguments are not checked, except
    that more than ``max_tokens`` real tokens raise a ValueError.
    """
    check_real_tokens(k, key_padding_mask, None, max_tokens)
    with autocast_off(k):
        turn = _turn(_positions(k, key_padding_mask, None), max_tokens, compute_dtype(k))
        keys = _features(k.to(compute_dtype(k)), phi, key_padding_mask, turn)
        return sums_of_source(keys, v, key_padding_mask)


def attend_source(
    q: Tensor,
    state: State,
    query_padding_mask: Tensor | None,
    positions: Tensor | None,
    phi: str,
    max_tokens: int,
) -> Tensor:
    """``cosformer_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype.

    ``query_padding_mask`` (B, n), True = padding, gives 0. ``positions`` (B, n) of the queries among the real tokens of
    their sequence, from 0; None counts them by the mask. O(n d e). Only ``positions``, which must be below
    ``max_tokens``, and ``state`` are checked (ValueError).
    """
    if positions is None:
        check_real_tokens(q, query_padding_mask, None, max_tokens)
        positions = _positions(q, query_padding_mask, None)
    else:
        check_real_positions(positions, query_padding_mask, max_tokens)
    with autocast_off(q):
        turn = _turn(positions, max_tokens, compute_dtype(q))
        queries = _features(q.to(compute_dtype(q)), phi, query_padding_mask, turn)
        return source_means(queries, state, least=EPS).to(q.dtype)


def _positions(x: Tensor, padding_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """The number of each real token of x (B, H, n, c), from 0, or from ``before`` (B,): (B or 1, n)."""
    if padding_mask is None:
        positions = torch.arange(x.shape[2], device=x.device).unsqueeze(0)
    else:
        positions = real_positions(padding_mask)
    return positions if before is None else positions + before.unsqueeze(1)


def _turn(positions: Tensor, max_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``positions`` (B or 1, n), from 0: (B or 1, 1, n, 1) each."""
    angle = (positions + 1).to(dtype)[:, None, :, None] * (math.pi / (2 * max_tokens))
    return angle.cos(), angle.sin()


def _features(x: Tensor, phi: str, padding_mask: Tensor | None, turn: tuple[Tensor, Tensor]) -> Tensor:
    """phi(x) times the cosine and times the sine of its position: (B, H, n, d) -> (B, H, n, 2d), 0 at padding."""
    x = zero_padding(x, padding_mask)
    x = zero_padding(F.relu(x) if phi == "relu" else elu_plus_one(x), padding_mask)
    cos, sin = turn
    return torch.cat([x * cos, x * sin], dim=-1)
