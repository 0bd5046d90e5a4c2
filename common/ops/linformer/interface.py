"""Linformer: softmax attention to a fixed number of learned sums of keys and values, in linear time.

Wang, Li, Khabsa, Fang, Ma, *Linformer: Self-Attention with Linear Complexity*, 2020, equation 7.
"""

from torch import Tensor

from ..shared.checks import check_masks, check_query_key_value
from ..shared.packed import takes_segments
from ..shared.padding import real_first, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.token_counts import check_real_tokens


@takes_segments("q", "k", "v")
def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """softmax(q (Eᵀ k)ᵀ / √d) Fᵀ v, with E = ``key_rows`` and F = ``value_rows``, both (M, p), for all heads.

    Row j of E and F belongs to the j-th real key, whatever the padding; fewer than M keys use the first rows. All sums
    are over all keys, so there is no causal form. q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e) in v's
    dtype. Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0, a padded key is in no sum. Cost: O((n
    + m) p (d + e)) time, O(n p) memory.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape or mask that does not fit, or more than M real keys.
    """
    check_query_key_value(q, k, v, one_length=False)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    if key_rows.dim() != 2 or key_rows.shape != value_rows.shape:
        raise ValueError(
            f"key_rows is {tuple(key_rows.shape)} and value_rows {tuple(value_rows.shape)}; allowed: both (M, p)"
        )
    check_real_tokens(k, key_padding_mask, None, key_rows.shape[0])
    with autocast_off(q):
        dtype = compute_dtype(q)
        q = zero_padding(q.to(dtype), query_padding_mask) * q.shape[3] ** -0.5
        few_k = _sums(k, key_rows, key_padding_mask)  # (B, H, p, d)
        few_v = _sums(v, value_rows, key_padding_mask)  # (B, H, p, e)
        out = (q @ few_k.transpose(2, 3)).softmax(-1) @ few_v
    return zero_padding(out, query_padding_mask).to(v.dtype)


def _sums(x: Tensor, rows: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The sums of x (B, H, m, c) with the weights ``rows`` (M, p) of its real tokens: (B, H, p, c)."""
    x = zero_padding(x.to(compute_dtype(x)), padding_mask)
    if padding_mask is not None:
        x = take(x, real_first(padding_mask))[:, :, : rows.shape[0]]  # tokens after the first M are padding
    return rows[: x.shape[2]].to(x.dtype).transpose(0, 1) @ x
