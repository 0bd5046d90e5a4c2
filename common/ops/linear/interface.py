"""Linear attention with the feature map elu+1, the baseline of all tables.

Katharopoulos, Vyas, Pappas, Fleuret, *Transformers are RNNs*, ICML 2020, equations 5, 7 and 9-12.
"""

from typing import Any

from torch import Tensor

from ..shared.checks import (
    ArgumentError,
    check_choice,
    check_masks,
    check_positive_int,
    check_query_key_value,
)
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_maps import FEATURE_MAPS, real_features
from ..shared.feature_sums import means, source_means, state_shapes, step_means, sums_of_source
from ..shared.forgetting import check_log_decay, decay_of_real_tokens
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, check_continuation, state_of_sums
from .scan import scanned_sums

#: Added to every normaliser, so that a row without sources gives 0 and not NaN.
EPS = 1e-6
#: How sums over earlier tokens are computed: chunk by chunk, or token by token.
CUMULATIVE_SUMS = ("matmul", "scan")


@takes_segments("q", "k", "v", "log_decay")
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    phi: str = "elu+1",
    chunk_size: int = CHUNK_SIZE,
    cumulative_sum: str = "matmul",
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """phi(q_i)·Σ_j phi(k_j) v_jᵀ / (phi(q_i)·Σ_j phi(k_j) + 1e-6), over all j, or j <= i when causal.

    q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) ->
    (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0. Cost: O(n d e)
    time and, causal, O(n C + (n / C) d e) memory with C = ``chunk_size``. ``initial_state`` and ``return_state``
    (causal) continue a sequence: state ``sum_k`` (B, H, d), ``sum_kv`` (B, H, d, e), float32.
    ``cumulative_sum``: how the causal sums are computed, with the same result. ``matmul`` is matrix products chunk by
    chunk, or kernels on a CPU; ``scan`` is n sequential steps in O(n (d + e) + d e) memory, without ``chunk_size``.
    ``log_decay`` (causal) makes both sums decay: before token t is added they are multiplied by exp(log_decay_t). It is
    (B, H, n), one gate per head, or (B, H, n, d), one per channel of the keys.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name or state that does not fit, a state or gates without ``causal``, or gates with
            ``cumulative_sum="scan"``.
    """
    check_choice("phi", phi, FEATURE_MAPS)
    check_choice("cumulative_sum", cumulative_sum, CUMULATIVE_SUMS)
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_log_decay(log_decay, causal, q, q.shape[3])
    if log_decay is not None and cumulative_sum == "scan":
        raise ArgumentError("`cumulative_sum` is 'scan'; allowed for sums that forget: 'matmul'")
    dtype = compute_dtype(q)
    initial_state = state_of_sums(initial_state, state_shapes(q.shape[3], v), dtype, q)
    with autocast_off(q):
        values, in_sums = zero_padding(in_dtype(v, dtype), key_padding_mask), phi
        queries, keys = in_dtype(q, dtype), in_dtype(k, dtype)
        # Without padding, kernels apply the map; features of padding must be 0.
        if not causal or cumulative_sum == "scan" or key_padding_mask is not None or query_padding_mask is not None:
            queries = real_features(queries, phi, query_padding_mask)
            keys, in_sums = real_features(keys, phi, key_padding_mask), None
        if causal and cumulative_sum == "scan":
            out, weights, state = scanned_sums(queries, keys, values, initial_state)
            out = out / (weights + EPS)
        else:
            decay, state = decay_of_real_tokens(log_decay, key_padding_mask, dtype), initial_state
            sums_options = {"eps": EPS, "phi": in_sums, "precision": v.dtype}
            out, state = means(queries, keys, values, causal, chunk_size, state, decay, **sums_options)
    out = out.to(v.dtype)
    return (out, state) if return_state else out


@step_of(linear_attention)
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, phi: str, log_decay: Tensor | None = None, **_: Any
) -> tuple[Tensor, State]:
    """``linear_attention`` of one token after ``state``; see ``step_of``."""
    return step_means(q, k, v, state, log_decay, eps=EPS, phi=phi)


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, phi: str) -> State:
    """State of a source: ``sum_k`` (B, H, d) and ``sum_kv`` (B, H, d, e), float32; O(m d e).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. Arguments are not checked.
    """
    with autocast_off(k):
        return sums_of_source(real_features(k.to(compute_dtype(k)), phi, key_padding_mask), v, key_padding_mask)


def attend_source(q: Tensor, state: State, query_padding_mask: Tensor | None, phi: str) -> Tensor:
    """``linear_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype; O(n d e).

    ``query_padding_mask`` (B, n), True = padding, gives 0. Only ``state`` is checked (ValueError).
    """
    with autocast_off(q):
        features = real_features(q.to(compute_dtype(q)), phi, query_padding_mask)
        return source_means(features, state, eps=EPS).to(q.dtype)
