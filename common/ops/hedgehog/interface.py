"""Hedgehog: linear attention with learned features that imitate the weights of softmax attention.

Zhang, Bhatia, Kumbong, Ré, *The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry*, ICLR
2024, in the form of Zhang et al., *LoLCATs*, ICLR 2025: a softmax over the map's output and one over its negative.
"""

from typing import Any

from torch import Tensor

from ..shared.checks import check_masks, check_positive_int, check_query_key_value
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import means, source_means, state_shapes, step_means, sums_of_source
from ..shared.learned_features import check_map, learned_features, number_of_features
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation, state_of_sums

#: Added to every normaliser, so that a row without sources gives 0 and not NaN.
EPS = 1e-6


@takes_segments("q", "k", "v")
def hedgehog_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """phi(q_i)·Σ_j psi(k_j) v_jᵀ / (phi(q_i)·Σ_j psi(k_j) + 1e-6), over all j, or j <= i when causal.

    phi(x) = [softmax(W x + b), softmax(-W x - b)], with the W of each head in ``query_weight`` (H, r, d) and b in
    ``query_bias`` (H, r); psi likewise, with ``key_weight`` and ``key_bias``. Queries and keys are not divided by √d.
    q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True =
    padding; a padded query gives 0. Cost: O(n r (d + e)) time and, causal, O(n (C + r) + (n / C) r e) memory with
    C = ``chunk_size``. ``initial_state`` and ``return_state`` (causal) continue a sequence: state ``sum_k`` (B, H, 2r),
    ``sum_kv`` (B, H, 2r, e), float32.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit; maps of different r; a state without ``causal``.
    """
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_maps(q, k, query_weight, query_bias, key_weight, key_bias)
    dtype = compute_dtype(q)
    state = state_of_sums(initial_state, state_shapes(number_of_features(key_weight, "softmax"), v), dtype, q)
    with autocast_off(q):
        queries = learned_features(q, query_weight, query_bias, "softmax", query_padding_mask)
        keys = learned_features(k, key_weight, key_bias, "softmax", key_padding_mask)
        values = zero_padding(v.to(dtype), key_padding_mask)
        out, state = means(queries, keys, values, causal, chunk_size, state, eps=EPS, precision=v.dtype)
    out = out.to(v.dtype)
    return (out, state) if return_state else out


@step_of(hedgehog_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    **_: Any,
) -> tuple[Tensor, State]:
    """``hedgehog_attention`` of one token after ``state``; see ``step_of``."""
    queries = learned_features(q, query_weight, query_bias, "softmax", None)
    keys = learned_features(k, key_weight, key_bias, "softmax", None)
    return step_means(queries, keys, v, state, eps=EPS)


def check_maps(
    q: Tensor,
    k: Tensor,
    query_weight: Tensor,
    query_bias: Tensor | None,
    key_weight: Tensor,
    key_bias: Tensor | None,
) -> None:
    """Raise ValueError unless the maps fit q and k and give the same number of features."""
    check_map("query", q, query_weight, query_bias)
    check_map("key", k, key_weight, key_bias)
    if query_weight.shape[1] != key_weight.shape[1]:
        shapes = f"query_weight is {tuple(query_weight.shape)} and key_weight {tuple(key_weight.shape)}"
        raise ValueError(f"{shapes}; allowed: equally many rows for each head")


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, key_weight: Tensor, key_bias: Tensor) -> State:
    """State of a source: ``sum_k`` (B, H, 2r) and ``sum_kv`` (B, H, 2r, e), float32; O(m r (d + e)).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. Only the map is checked (ValueError).
    """
    check_map("key", k, key_weight, key_bias)
    with autocast_off(k):
        features = learned_features(k, key_weight, key_bias, "softmax", key_padding_mask)
        return sums_of_source(features, v, key_padding_mask)


def attend_source(
    q: Tensor, state: State, query_padding_mask: Tensor | None, query_weight: Tensor, query_bias: Tensor
) -> Tensor:
    """``hedgehog_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype.

    O(n r (d + e)). ``query_padding_mask`` (B, n), True = padding, gives 0. Only the map and ``state`` are checked
    (ValueError).
    """
    check_map("query", q, query_weight, query_bias)
    with autocast_off(q):
        features = learned_features(q, query_weight, query_bias, "softmax", query_padding_mask)
        return source_means(features, state, eps=EPS).to(q.dtype)
