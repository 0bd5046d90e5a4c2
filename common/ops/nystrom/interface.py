"""Nyström attention: softmax attention through the means of segments, in linear time.

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh, *Nyströmformer: A Nyström-Based Algorithm for Approximating
Self-Attention*, AAAI 2021.
"""

import torch
from torch import Tensor

from ..shared.checks import ArgumentError, check_masks, check_positive_int, check_query_key_value, shape_of
from ..shared.depthwise import depthwise_conv2d
from ..shared.packed import takes_segments
from ..shared.padding import either_mask, put_back, real_first, real_positions, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.score_kernels import masked_softmax

#: Each step magnifies rounding errors up to 13/4 times: float32 errors are 0.001 of the result after 20 steps, and
#: larger than the result after 30.
MOST_ITERATIONS = 20


@takes_segments("q", "k", "v")
def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    conv_weight: Tensor | None = None,
    landmarks: int = 64,
    iterations: int = 6,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """softmax(q k̃ᵀ) Z (softmax(q̃ kᵀ) v), with Z ≈ the pseudoinverse of softmax(q̃ k̃ᵀ), and a convolution of v.

    q and k are divided by d^(1/4). q̃ and k̃ are means of m = ``landmarks`` segments of equal length up to one token:
    the t-th of n real tokens is in segment floor(t m / n). With fewer tokens than landmarks, each token is a landmark.
    Z is Aᵀ / (|A|₁ |A|∞) after ``iterations`` steps Z ← Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4, separately for each
    A = softmax(q̃ k̃ᵀ). With ``conv_weight`` (H, 1, K, 1), K odd, a depthwise convolution of v over the real tokens
    is added. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding.
    Queries and keys are the same tokens: a token that is padding by either mask gives 0 and is in no landmark of
    queries. Cost: O(n m (d + e) + m³ + n K e) time, O(n m + m²) memory.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or number that does not fit.
    """
    check_positive_int("landmarks", landmarks)
    check_positive_int("iterations", iterations)
    if iterations > MOST_ITERATIONS:
        raise ArgumentError(f"`iterations` is {iterations}; allowed: at most {MOST_ITERATIONS}")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    _check_weight(conv_weight, v)
    with autocast_off(q):
        dtype = compute_dtype(q)
        scale = q.shape[3] ** -0.25
        query_padding_mask = either_mask(query_padding_mask, key_padding_mask)
        queries = zero_padding(q.to(dtype), query_padding_mask) * scale
        keys, values = (zero_padding(x.to(dtype), key_padding_mask) for x in (k, v))
        keys = keys * scale
        mean_q, no_q = _segment_means(queries, query_padding_mask, landmarks)
        mean_k, no_k = _segment_means(keys, key_padding_mask, landmarks)
        few_q, few_k = mean_q @ queries, (mean_k @ keys).transpose(2, 3)  # (B, H, m, d), (B, H, d, m)
        first = masked_softmax(queries @ few_k, no_k.unsqueeze(2))  # (B, H, n, m)
        # A landmark without tokens has a row or column of zeros, also in the inverse.
        middle = masked_softmax(few_q @ few_k, no_k.unsqueeze(2)).masked_fill(no_q.unsqueeze(3), 0.0)
        hidden = None if key_padding_mask is None else key_padding_mask[:, None, None]
        last = masked_softmax(few_q @ keys.transpose(2, 3), hidden)  # (B, H, m, n)
        out = first @ (_inverse(middle, iterations) @ (last @ values))
        if conv_weight is not None:
            out = out + _convolved(values, conv_weight.to(dtype), key_padding_mask)
        return zero_padding(out, query_padding_mask).to(v.dtype)


def _segment_means(x: Tensor, padding_mask: Tensor | None, landmarks: int) -> tuple[Tensor, Tensor]:
    """The matrix (B or 1, 1, m, n) of segment means of x (B, H, n, d), and True for empty segments, (B or 1, 1, m).

    Segments are equal parts of the real tokens; an empty segment has a row of zeros. O(n m).
    """
    if padding_mask is None:
        n = x.shape[2]
        segments = (torch.arange(n, device=x.device) * landmarks // n).unsqueeze(0)  # (1, n)
    else:
        n = (~padding_mask).sum(1, keepdim=True).clamp(min=1)
        segments = (real_positions(padding_mask) * landmarks // n).masked_fill(padding_mask, -1)  # (B, n)
    member = segments.unsqueeze(1) == torch.arange(landmarks, device=x.device).unsqueeze(1)
    count = member.sum(2)  # (B or 1, m)
    means = member.to(x.dtype) / count.clamp(min=1).unsqueeze(2)
    return means.unsqueeze(1), (count == 0).unsqueeze(1)


def _inverse(a: Tensor, iterations: int) -> Tensor:
    """The approximate pseudoinverse of each matrix of a (B, H, m, m), entries at least 0; O(m³)."""
    identity = torch.eye(a.shape[3], dtype=a.dtype, device=a.device)
    # Each matrix has its own start, independent of the rest of the batch. It is all zeros only without tokens.
    norm = a.sum(2).amax(2) * a.sum(3).amax(2)  # (B, H)
    z = a.transpose(2, 3) / norm.masked_fill(norm == 0.0, 1.0)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13.0 * identity - az @ (15.0 * identity - az @ (7.0 * identity - az)))
    return z


def _convolved(v: Tensor, weight: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The depthwise convolution of v (B, H, n, e) over its real tokens with weight (H, 1, K, 1); 0 at padding."""
    order = real_first(padding_mask)
    out = depthwise_conv2d(take(v, order), weight)
    return zero_padding(put_back(out, order), padding_mask)


def _check_weight(weight: Tensor | None, v: Tensor) -> None:
    if weight is None:
        return
    fits = isinstance(weight, Tensor) and weight.dim() == 4 and weight.shape[2] % 2 == 1
    if not fits or weight.shape != (v.shape[1], 1, weight.shape[2], 1):
        raise ValueError(
            f"v has {v.shape[1]} heads and conv_weight is {shape_of(weight)}; allowed: (heads of v, 1, an odd number "
            "of tokens, 1)"
        )
