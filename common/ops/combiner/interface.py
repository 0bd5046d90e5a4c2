"""Combiner with a row-major axial factorisation: a query sees its own row token by token, earlier rows as summaries.

Ren et al., *Combiner: Full Attention Transformer with Sparse Computation Cost*, NeurIPS 2021, and the authors' code: a
sequence is laid out in rows of R tokens. The summary of a row in a column is the attention output of that column's
token over the whole row; a query sees its own row and, in its own column, the summaries of the rows before.
"""

import math

from torch import Tensor

from ..shared.checks import check_padding_mask, check_positive_int, check_query_key_value
from ..shared.packed import takes_segments
from ..shared.padding import put_back, real_first, zero_padding
from ..shared.precision import autocast_off
from ..shared.score_kernels import score_kernel
from .rows import attend_rows, padding_of_rows, rows_of


@takes_segments("q", "k", "v")
def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    row_length: int,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every token to its whole row, with later tokens: the values of the row's summaries.

    R = ``row_length``: q and k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype.
    ``key_padding_mask``: bool (B, n), True = padding, on any side; rows count real tokens, a padded token gives 0.
    O(n R (d + e)) time, O(n R) memory.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype or mask that does not fit, or ``row_length`` below 1.
    """
    _check(q, k, v, row_length, key_padding_mask)
    with autocast_off(q):
        order, hidden = real_first(key_padding_mask), padding_of_rows(q, row_length, key_padding_mask)
        rows = (rows_of(x, order, row_length, key_padding_mask) for x in (q, k, v))
        q_rows, k_rows, v_rows = rows  # (B, H, G, R, c)
        scores = q_rows @ k_rows.transpose(-2, -1) / math.sqrt(q.shape[3])  # (B, H, G, R, R)
        out = score_kernel(scores, "softmax", hidden[:, None, :, None, :]) @ v_rows
        out = put_back(out.flatten(2, 3)[:, :, : q.shape[2]], order)
    return zero_padding(out, key_padding_mask).to(v.dtype)


@takes_segments("q", "k", "v", "summary_k", "summary_v")
def combiner_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_k: Tensor,
    summary_v: Tensor,
    *,
    row_length: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """One softmax over the keys of a token's row and the summaries in its column, of the rows before or of all rows.

    Shapes as in ``row_attention``; ``summary_k`` (B, H, n, d) and ``summary_v`` (B, H, n, e) have the position of their
    token. Causal: a token sees its row up to itself, and the rows before. O(n (R + n / R) (d + e)) time, O(n (R + n /
    R)) memory: n √n at R = √n.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype or mask that does not fit, or ``row_length`` below 1.
    """
    _check(q, k, v, row_length, key_padding_mask)
    for name, summary, like in (("summary_k", summary_k, k), ("summary_v", summary_v, v)):
        if summary.shape != like.shape or summary.dtype != like.dtype:
            raise ValueError(
                f"{name} is {tuple(summary.shape)}, {summary.dtype}; allowed: {tuple(like.shape)}, {like.dtype}"
            )
    with autocast_off(q):
        out = attend_rows(q, k, v, summary_k, summary_v, row_length, causal, key_padding_mask, None)
    return zero_padding(out, key_padding_mask).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, row_length: int, padding_mask: Tensor | None) -> None:
    check_query_key_value(q, k, v, one_length=True)
    check_padding_mask("key_padding_mask", padding_mask, k)
    check_positive_int("row_length", row_length)
