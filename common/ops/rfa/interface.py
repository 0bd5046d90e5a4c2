"""Random feature attention: a Gaussian kernel of unit vectors, estimated by sines and cosines, in linear time.

Peng, Pappas, Yogatama, Schwartz, Smith, Kong, *Random Feature Attention*, ICLR 2021, sections 3.1 and 3.2 (the gate).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import (
    check_floor,
    check_masks,
    check_of_tokens,
    check_padding_mask,
    check_positive_int,
    check_query_key_value,
    check_tokens,
    shape_of,
)
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import means, source_means, state_shapes, step_means, sums_of_source
from ..shared.forgetting import check_log_decay, decay_of_real_tokens
from ..shared.packed import takes_segments
from ..shared.padding import zero_padded_tokens, zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, check_continuation, state_of_sums
from ..shared.unit_vectors import unit_vectors


@takes_segments("q", "k", "v", "log_gate", "log_decay")
def rfa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    log_gate: Tensor | None = None,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    floor: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """phi(q_i)·S / max(phi(q_i)·z, floor) with S = Σ_j phi(k_j) v_jᵀ, z = Σ_j phi(k_j); over j <= i when causal.

    phi(x) = [sin(W x/|x|); cos(W x/|x|)] / √r with the W of each head in ``directions`` (H, r, d): phi(q)·phi(k) is
    exp(-|q/|q| - k/|k||²/2) in expectation for directions from N(0, 1). With ``log_gate`` (B, H, n), log g_t <= 0,
    causal: S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_tᵀ, and z likewise. With ``log_decay`` (B, H, n), or (B, H, n, 2r)
    for one gate per feature, causal: S_t = exp(log_decay_t) S_(t-1) + phi(k_t) v_tᵀ, and z likewise. Features, and so
    the normaliser, may be negative: hence ``floor``. q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) ->
    (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0, a padded key
    changes no sum. Cost: O(n r (d + e)) time and, causal, O(n (C + r) + (n / C) r e) memory with C = ``chunk_size``.
    ``initial_state`` and ``return_state``
    (causal) continue a sequence: state ``sum_k`` (B, H, 2r), ``sum_kv`` (B, H, 2r, e), float32.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit; a state or a gate without ``causal``; both gates.
    """
    check_positive_int("chunk_size", chunk_size)
    check_floor(floor)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    _check_directions("q", q, directions)
    _check_gate(q, log_gate, causal)
    check_log_decay(log_decay, causal, q, 2 * directions.shape[1])
    if log_gate is not None and log_decay is not None:
        raise ValueError("log_gate and log_decay are both given; allowed: one of them")
    dtype = compute_dtype(q)
    state = state_of_sums(initial_state, state_shapes(2 * directions.shape[1], v), dtype, q)
    with autocast_off(q):
        keys = _features(k, directions, key_padding_mask)
        log_decay = decay_of_real_tokens(log_decay if log_gate is None else log_gate, key_padding_mask, dtype)
        if log_gate is not None:
            keys = keys * -torch.expm1(log_decay).unsqueeze(-1)
        queries = _features(q, directions, query_padding_mask)
        values = zero_padding(v.to(dtype), key_padding_mask)
        sums_options = {"least": floor, "precision": v.dtype}
        out, state = means(queries, keys, values, causal, chunk_size, state, log_decay, **sums_options)
    out = out.to(v.dtype)
    return (out, state) if return_state else out


@takes_segments("q", "k", "v", "x")
def rfa_gate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    directions: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    floor: float = 0.01,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Causal ``rfa_attention`` with the gate g = sigmoid(w·x + b) of each token and head (section 3.2).

    x (B, n, D) are the tokens before their projection, ``gate_weight`` (H, D) and ``gate_bias`` (H,). Otherwise shapes,
    masks, state, cost and errors as in ``rfa_attention``, and ``causal=False`` is a ValueError.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.
    """
    check_query_key_value(q, k, v, one_length=True)
    check_padding_mask("key_padding_mask", key_padding_mask, k)
    check_tokens(x, q, gate_weight.shape[1])
    # In float32 or float64, also under autocast: errors add up over many tokens.
    dtype = compute_dtype(q)
    x = zero_padded_tokens(x.to(dtype), key_padding_mask)  # values at padding must not reach the gradients
    with autocast_off(q):
        gate = F.linear(x, gate_weight.to(dtype), gate_bias.to(dtype))  # (B, n, H)
    log_gate = F.logsigmoid(gate).transpose(1, 2)
    options = {"log_gate": log_gate, "causal": causal, "floor": floor, "chunk_size": chunk_size}
    masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
    state = {"initial_state": initial_state, "return_state": return_state}
    return rfa_attention(q, k, v, directions, **options, **masks, **state)


@step_of(rfa_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    directions: Tensor,
    floor: float,
    log_decay: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, State]:
    """``rfa_attention`` of one token after ``state``; see ``step_of``."""
    queries, keys = _features(torch.cat([q, k], dim=2), directions, None).split(1, dim=2)
    return step_means(queries, keys, v, state, log_decay, least=floor)


@step_of(rfa_gate_attention)
def _gate_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    x: Tensor,
    directions: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    floor: float,
    **_: Any,
) -> tuple[Tensor, State]:
    """``rfa_gate_attention`` of one token after ``state``; see ``step_of``."""
    log_gate = F.logsigmoid(F.linear(x, in_dtype(gate_weight, q.dtype), in_dtype(gate_bias, q.dtype))).transpose(
        1, 2
    )  # (B, H, 1)
    queries, keys = _features(torch.cat([q, k], dim=2), directions, None).split(1, dim=2)
    keys = keys * -torch.expm1(log_gate).unsqueeze(-1)
    return step_means(queries, keys, v, state, log_gate, least=floor)


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, directions: Tensor) -> State:
    """State of a source: ``sum_k`` (B, H, 2r) and ``sum_kv`` (B, H, 2r, e), float32; O(m r e).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. Only ``directions`` are checked
    (ValueError).
    """
    _check_directions("k", k, directions)
    with autocast_off(k):
        return sums_of_source(_features(k, directions, key_padding_mask), v, key_padding_mask)


def attend_source(
    q: Tensor, state: State, query_padding_mask: Tensor | None, directions: Tensor, floor: float
) -> Tensor:
    """``rfa_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype; O(n r e).

    ``query_padding_mask`` (B, n), True = padding, gives 0. ``directions`` are those of the state. Only they and
    ``state`` are checked (ValueError).
    """
    _check_directions("q", q, directions)
    with autocast_off(q):
        return source_means(_features(q, directions, query_padding_mask), state, least=floor).to(q.dtype)


def _features(x: Tensor, directions: Tensor, padding_mask: Tensor | None) -> Tensor:
    """phi(x): (B, H, n, d) -> (B, H, n, 2r) in float32 or float64, 0 at padding."""
    dtype = compute_dtype(x)
    x = unit_vectors(zero_padding(x.to(dtype), padding_mask))
    projected = x @ directions.to(dtype).transpose(1, 2)  # (B, H, n, r)
    features = torch.cat([projected.sin(), projected.cos()], dim=-1) * directions.shape[1] ** -0.5
    return zero_padding(features, padding_mask)


def _check_directions(name: str, x: Tensor, directions: Tensor) -> None:
    fits = isinstance(directions, Tensor) and directions.dim() == 3
    if not fits or (directions.shape[0], directions.shape[2]) != (x.shape[1], x.shape[3]):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and directions {shape_of(directions)}; "
            f"allowed: (heads of {name}, features, channels of {name})"
        )


def _check_gate(q: Tensor, log_gate: Tensor | None, causal: bool) -> None:
    if log_gate is None:
        return
    if not causal:
        raise ValueError("log_gate is given with causal=False; allowed: only with causal=True")
    check_of_tokens("log_gate", log_gate, q)
