"""T2R: linear attention with a learned feature map, so that it can replace a trained softmax attention.

Kasai, Peng, Zhang, Yogatama, Ilharco, Pappas, Mao, Chen, Smith, *Finetuning Pretrained Transformers into RNNs*, EMNLP
2021, section 2.
"""

from typing import Any

from torch import Tensor

from ..shared.checks import check_floor, check_masks, check_positive_int, check_query_key_value
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import means, source_means, state_shapes, step_means, sums_of_source
from ..shared.learned_features import check_map, learned_features
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation, state_of_sums


@takes_segments("q", "k", "v")
def t2r_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_weight: Tensor,
    map_bias: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    floor: float = 1e-2,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """phi(q_i/√d)·S / max(phi(q_i/√d)·z, floor) with S = Σ_j phi(k_j) v_jᵀ, z = Σ_j phi(k_j); j <= i when causal.

    phi(x) = relu(W x + b) with the W of each head in ``map_weight`` (H, f, d) and b in ``map_bias`` (H, f): one map for
    queries and keys. A query with no weight on any key gives 0, hence ``floor``. q (B, H, n, d), k (B, H, m, d),
    v (B, H, m, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0.
    Cost: O(n f (d + e)) time and, causal, O(n (C + f) + (n / C) f e) memory with C = ``chunk_size``. ``initial_state``
    and ``return_state`` (causal) continue a sequence: state ``sum_k`` (B, H, f), ``sum_kv`` (B, H, f, e), float32.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit; a state without ``causal``.
    """
    check_positive_int("chunk_size", chunk_size)
    check_floor(floor)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_map("map", q, map_weight, map_bias)
    dtype = compute_dtype(q)
    state = state_of_sums(initial_state, state_shapes(map_weight.shape[1], v), dtype, q)
    with autocast_off(q):
        queries = _query_features(q, map_weight, map_bias, query_padding_mask)
        keys = learned_features(k, map_weight, map_bias, "relu", key_padding_mask)
        values = zero_padding(v.to(dtype), key_padding_mask)
        out, state = means(queries, keys, values, causal, chunk_size, state, least=floor, precision=v.dtype)
    out = out.to(v.dtype)
    return (out, state) if return_state else out


@step_of(t2r_attention)
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, map_weight: Tensor, map_bias: Tensor, floor: float, **_: Any
) -> tuple[Tensor, State]:
    """``t2r_attention`` of one token after ``state``; see ``step_of``."""
    queries = _query_features(q, map_weight, map_bias, None)
    return step_means(queries, learned_features(k, map_weight, map_bias, "relu", None), v, state, least=floor)


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, map_weight: Tensor, map_bias: Tensor) -> State:
    """State of a source: ``sum_k`` (B, H, f) and ``sum_kv`` (B, H, f, e), float32; O(m f (d + e)).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. Only the map is checked (ValueError).
    """
    check_map("map", k, map_weight, map_bias)
    with autocast_off(k):
        return sums_of_source(learned_features(k, map_weight, map_bias, "relu", key_padding_mask), v, key_padding_mask)


def attend_source(
    q: Tensor,
    state: State,
    query_padding_mask: Tensor | None,
    map_weight: Tensor,
    map_bias: Tensor,
    floor: float,
) -> Tensor:
    """``t2r_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype.

    O(n f (d + e)). ``query_padding_mask`` (B, n), True = padding, gives 0. Only the map and ``state`` are checked
    (ValueError).
    """
    check_map("map", q, map_weight, map_bias)
    with autocast_off(q):
        features = _query_features(q, map_weight, map_bias, query_padding_mask)
        return source_means(features, state, least=floor).to(q.dtype)


def _query_features(q: Tensor, map_weight: Tensor, map_bias: Tensor, padding_mask: Tensor | None) -> Tensor:
    """phi(q/√d), (B, H, n, f)."""
    q = q.to(compute_dtype(q)) * q.shape[3] ** -0.5
    return learned_features(q, map_weight, map_bias, "relu", padding_mask)
