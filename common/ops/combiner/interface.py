"""Combiner with a row-major axial factorisation: a token's own row token by token, every earlier row as one summary.

Ren et al., *Combiner: Full Attention Transformer with Sparse Computation Cost*, NeurIPS 2021, and the authors' code: a
sequence is laid out in rows of R tokens. A row's summary in a column is what that column's token of the row attends to
in the whole row; a query sees its own row and, in its own column, the summaries of the rows before.
"""

import math

import torch
from torch import Tensor

from ..shared.checks import check_padding_mask, check_positive_int, check_query_key_value
from ..shared.chunks import split_chunks
from ..shared.packed import takes_segments
from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.score_kernels import score_kernel


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
    """Softmax attention of every token to its whole row, later tokens included: the values of the row's summaries.

    R = ``row_length``: q and k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype.
    ``key_padding_mask``: bool (B, n), True = padding, on any side; rows count real tokens, a padded token gives 0.
    O(n R (d + e)) time, O(n R) memory.

    ``segment_ids`` (B, n), integers that never decrease along a row: its documents, which do not see each other;
    see ``shared/packed.py``.

    Raises:
        ValueError: a shape, dtype or mask that does not fit, or ``row_length`` below 1.
    """
    _check(q, k, v, row_length, key_padding_mask)
    with autocast_off(q):
        order, hidden = real_first(key_padding_mask), _padding_of_rows(q, row_length, key_padding_mask)
        rows = (_rows(x, order, row_length, key_padding_mask) for x in (q, k, v))
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

    Shapes as in ``row_attention``; ``summary_k`` (B, H, n, d) and ``summary_v`` (B, H, n, e) stand where their token
    does. Causal: a token sees its row up to itself, and the rows before. O(n (R + n / R) (d + e)) time, O(n (R + n /
    R)) memory: n √n at R = √n.

    ``segment_ids`` (B, n), integers that never decrease along a row: its documents, which do not see each other;
    see ``shared/packed.py``.

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
        order, padding = real_first(key_padding_mask), _padding_of_rows(q, row_length, key_padding_mask)
        rows = (_rows(x, order, row_length, key_padding_mask) for x in (q, k, v, summary_k, summary_v))
        q_rows, k_rows, v_rows, k_columns, v_columns = rows  # (B, H, G, R, c)
        # Summaries by column: (B, H, G, R, c) -> (B, H, R, G, c)
        k_columns, v_columns = k_columns.transpose(2, 3), v_columns.transpose(2, 3)
        near = q_rows @ k_rows.transpose(-2, -1)  # (B, H, G, R, R)
        far = (q_rows.transpose(2, 3) @ k_columns.transpose(-2, -1)).transpose(2, 3)  # (B, H, G, R, G)
        near_hidden = padding[:, None, :, None, :]  # (B, 1, G, 1, R)
        far_hidden = padding.transpose(1, 2)[:, None, None]  # (B, 1, 1, R, G)
        if causal:
            column, row = (torch.arange(size, device=q.device) for size in (row_length, padding.shape[1]))
            near_hidden = near_hidden | (column > column[:, None])
            far_hidden = far_hidden | (row >= row[:, None])[:, None]  # (G, 1, G): rows before this one
        groups = padding.shape[1]
        near_hidden = near_hidden.expand(-1, -1, groups, row_length, -1)
        far_hidden = far_hidden.expand(-1, -1, groups, -1, -1)
        scores = torch.cat([near, far], dim=-1) / math.sqrt(q.shape[3])  # (B, H, G, R, R + G)
        weights = score_kernel(scores, "softmax", torch.cat([near_hidden, far_hidden], dim=-1))
        near, far = weights.split([row_length, groups], dim=-1)
        out = near @ v_rows + (far.transpose(2, 3) @ v_columns).transpose(2, 3)
        out = put_back(out.flatten(2, 3)[:, :, : q.shape[2]], order)
    return zero_padding(out, key_padding_mask).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, row_length: int, padding_mask: Tensor | None) -> None:
    check_query_key_value(q, k, v, one_length=True)
    check_padding_mask("key_padding_mask", padding_mask, k)
    check_positive_int("row_length", row_length)


def _rows(x: Tensor, order: Tensor | None, row_length: int, padding_mask: Tensor | None) -> Tensor:
    """Real tokens in rows, in the dtype of sums: (B, H, n, c) -> (B, H, G, R, c)."""
    return split_chunks(take(zero_padding(x.to(compute_dtype(x)), padding_mask), order), row_length)


def _padding_of_rows(q: Tensor, row_length: int, padding_mask: Tensor | None) -> Tensor:
    """Which places of the G rows hold no real token, (B, G, R)."""
    batch, n = q.shape[0], q.shape[2]
    real = torch.full((batch,), n, device=q.device) if padding_mask is None else (~padding_mask).sum(1)
    groups = -(-n // row_length)
    place = torch.arange(groups * row_length, device=q.device).view(groups, row_length)
    return place >= real[:, None, None]
