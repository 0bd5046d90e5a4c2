"""A whole sequence: blocks of queries with the keys of their windows, and running sums over all other keys.

A short sequence is computed as all pairs of queries and keys, which is faster on a CPU.
Far keys before a query are a running sum of keys and values that are shifted by the window; far keys after it are the
same sum from the end. No sum is formed as a difference.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hedgehog.interface import EPS
from ..shared.feature_sums import causal_sums
from ..shared.learned_features import learned_features, number_of_features
from ..shared.padding import put_back, real_first, take
from ..shared.state import State
from ..shared.window_softmax import Window, hide, join_blocks, scores_in_window, sliding_window


class Maps(NamedTuple):
    """The learned maps of queries and keys."""

    query_weight: Tensor  # (H, r, d)
    query_bias: Tensor | None  # (H, r)
    key_weight: Tensor
    key_bias: Tensor | None
    feature_map: str
    precision: torch.dtype  # of the tokens as they were given

    def of_queries(self, q: Tensor) -> Tensor:
        """Features of queries: (B, H, n, d) -> (B, H, n, f)."""
        return learned_features(q, self.query_weight, self.query_bias, self.feature_map, None)

    def of_keys(self, k: Tensor) -> Tensor:
        """Features of keys: (B, H, n, d) -> (B, H, n, f)."""
        return learned_features(k, self.key_weight, self.key_bias, self.feature_map, None)

    def number_of_features(self) -> int:
        """The number f of features of a query or key."""
        return number_of_features(self.key_weight, self.feature_map)


def whole_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: Maps,
    share: Tensor,
    window: int,
    causal: bool,
    padding_mask: Tensor | None,
    chunk_size: int,
    part: str,
) -> Tensor:
    """The outputs of q, k and v, which are 0 at padding (B, n; True = padding), with ``share`` γ (H, 1, 1)."""
    order = real_first(padding_mask)
    q, k, v = (take(x, order) for x in (q, k, v))
    n = q.shape[2]
    real = None if padding_mask is None else (~padding_mask).sum(1, keepdim=True)  # (B, 1)
    before, after = (window - 1, 0) if causal else (window // 2, (window - 1) // 2)
    few = n <= (chunk_size if causal else 2 * chunk_size)  # one chunk for each of the sums below
    if few and part == "both" and not torch.compiler.is_compiling():  # a graph must not depend on the length
        return put_back(_every_pair(q, k, v, maps, share, (before, after), causal, real), order)
    if part == "window":
        values, weights = near(q, k, v, sliding_window(before, after, n), share, real)
        return put_back(values / weights, order)
    if part == "linear":  # no token is near
        before, after = -1, 0
    features = maps.of_queries(q), _real(maps.of_keys(k), real)
    values, weights, _ = far_before(*features, v, before + 1, chunk_size, None, real, maps.precision)
    if not causal:
        flipped = [x.flip(2) for x in (*features, v)]
        later_values, later_weights, _ = far_before(*flipped, after + 1, chunk_size, None, None, maps.precision)
        values, weights = values + later_values.flip(2), weights + later_weights.flip(2)
    if part == "linear":
        return put_back(values / (weights + EPS), order)
    near_values, near_weights = near(q, k, v, sliding_window(before, after, n), share, real)
    return put_back((near_values + values) / (near_weights + weights), order)


def _every_pair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: Maps,
    share: Tensor,
    reach: tuple[int, int],
    causal: bool,
    real: Tensor | None,
) -> Tensor:
    """``whole_sequence`` for few tokens, as all pairs of queries and keys; O(n² (d + e + f)) time, O(n²) memory.

    q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); the first ``real`` (B, 1) tokens of a row are real, None for all.
    ``reach`` is the numbers of near tokens before and after a query.
    """
    position = torch.arange(q.shape[2], device=q.device)
    distance = position.unsqueeze(1) - position  # (n, n)
    near = (distance <= reach[0]) & (distance >= -reach[1])
    seen = near if real is None else near & (position < real.view(-1, 1, 1, 1))
    scores = hide(q * q.shape[3] ** -0.5 @ k.transpose(-2, -1), seen)
    weights = window_weights(scores, share)
    far = maps.of_queries(q) @ _real(maps.of_keys(k), real).transpose(-2, -1)
    far = far.masked_fill(near | (distance < 0) if causal else near, 0.0)
    weights = weights + far  # (B, H, n, n)
    return weights @ v / weights.sum(-1, keepdim=True)


def far_before(
    queries: Tensor,
    keys: Tensor,
    v: Tensor,
    distance: int,
    chunk_size: int,
    state: State | None,
    real: Tensor | None,
    precision: torch.dtype,
) -> tuple[Tensor, Tensor, State]:
    """Sums over the keys at least ``distance`` tokens before each query: of values, of weights, and the state of both.

    ``queries`` and ``keys`` are features (B, H, n, f), v (B, H, n, e). ``state`` has the sums over all earlier keys.
    The returned state is that after the last of the ``real`` (B, 1) tokens of each row.
    """
    n = v.shape[2]
    # Keys shifted beyond the end are not far from any of these tokens.
    keys, v = (F.pad(x, (0, 0, distance, 0))[:, :, :n] for x in (keys, v))
    return causal_sums(queries, _real(keys, real), v, chunk_size, state, None, precision)


def window_weights(scores: Tensor, share: Tensor) -> Tensor:
    """γ e^(s_ij - c_i) of ``scores`` (..., K), where c_i is the largest of a row; ``share`` is γ and broadcasts."""
    return (scores - scores.amax(-1, keepdim=True)).exp() * share


def near(q: Tensor, k: Tensor, v: Tensor, window: Window, share: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """γ Σ e^(s_ij - c_i) v_j (B, H, n, e) and γ Σ e^(s_ij - c_i) (B, H, n, 1) over each query's window; O(n K (d + e)).

    The first ``real`` (B, 1) tokens of each row are not padding; None for all.
    """
    n = q.shape[2]
    seen = torch.arange(n, device=q.device) < (n if real is None else real)  # (n,) or (B, n)
    scores, near_v = scores_in_window(q * q.shape[3] ** -0.5, k, v, seen.view(-1, 1, n, 1), window)
    weights = window_weights(scores, share.unsqueeze(2))
    return join_blocks(weights @ near_v, n), join_blocks(weights.sum(-1, keepdim=True), n)


def _real(features: Tensor, real: Tensor | None) -> Tensor:
    """``features`` (B, H, n, f) with zeros after the first ``real`` (B, 1) tokens of each row."""
    if real is None:
        return features
    padding = torch.arange(features.shape[2], device=features.device) >= real
    return features.masked_fill(padding[:, None, :, None], 0.0)
