"""Tokens laid out in rows, and the joint softmax of a token's row and its column of summaries, in plain PyTorch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.chunks import chunk_count, split_chunks
from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.precision import compute_dtype
from ..shared.score_kernels import score_kernel


class Earlier(NamedTuple):
    """Summaries of the rows before a part of a sequence."""

    k: Tensor  # (B, H, G R, d)
    v: Tensor  # (B, H, G R, e)
    hidden: Tensor  # bool (B, G): True for rows that a sequence does not have


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_k: Tensor,
    summary_v: Tensor,
    row_length: int,
    causal: bool,
    padding_mask: Tensor | None,
    earlier: Earlier | None,
) -> Tensor:
    """``combiner_attention``, (B, H, n, e), of checked tokens that begin with a row; arbitrary at padding.

    All tokens also see the summaries of ``earlier``.
    """
    order, padding = real_first(padding_mask), padding_of_rows(q, row_length, padding_mask)
    rows = (rows_of(x, order, row_length, padding_mask) for x in (q, k, v, summary_k, summary_v))
    q_rows, k_rows, v_rows, k_columns, v_columns = rows  # (B, H, G, R, c)
    # Summaries by column: (B, H, G, R, c) -> (B, H, R, G, c)
    k_columns, v_columns = k_columns.transpose(2, 3), v_columns.transpose(2, 3)
    near_hidden = padding[:, None, :, None, :]  # (B, 1, G, 1, R)
    far_hidden = padding.transpose(1, 2)[:, None, None]  # (B, 1, 1, R, G)
    groups = padding.shape[1]
    if causal:
        column, row = (torch.arange(size, device=q.device) for size in (row_length, groups))
        near_hidden = near_hidden | (column > column[:, None])
        far_hidden = far_hidden | (row >= row[:, None])[:, None]  # (G, 1, G): rows before this one
    near_hidden = near_hidden.expand(-1, -1, groups, row_length, -1)
    far_hidden = far_hidden.expand(-1, -1, groups, -1, -1)
    if earlier is not None:
        k_columns, v_columns = (
            torch.cat([x.to(y.dtype).unflatten(2, (-1, row_length)).transpose(2, 3), y], dim=3)
            for x, y in ((earlier.k, k_columns), (earlier.v, v_columns))
        )
        hidden = earlier.hidden[:, None, None, None].expand(-1, -1, groups, row_length, -1)
        far_hidden = torch.cat([hidden, far_hidden], dim=-1)
    near = q_rows @ k_rows.transpose(-2, -1)  # (B, H, G, R, R)
    far = (q_rows.transpose(2, 3) @ k_columns.transpose(-2, -1)).transpose(2, 3)  # (B, H, G, R, G)
    scores = torch.cat([near, far], dim=-1) / math.sqrt(q.shape[3])  # (B, H, G, R, R + G)
    weights = score_kernel(scores, "softmax", torch.cat([near_hidden, far_hidden], dim=-1))
    near, far = weights.split([row_length, k_columns.shape[3]], dim=-1)
    out = near @ v_rows + (far.transpose(2, 3) @ v_columns).transpose(2, 3)
    return put_back(out.flatten(2, 3)[:, :, : q.shape[2]], order)


def rows_of(x: Tensor, order: Tensor | None, row_length: int, padding_mask: Tensor | None) -> Tensor:
    """Real tokens in rows, in the dtype for sums: (B, H, n, c) -> (B, H, G, R, c)."""
    return split_chunks(take(zero_padding(x.to(compute_dtype(x)), padding_mask), order), row_length)


def padding_of_rows(q: Tensor, row_length: int, padding_mask: Tensor | None) -> Tensor:
    """True for places of the G rows without a real token, (B, G, R)."""
    batch, n = q.shape[0], q.shape[2]
    real = torch.full((batch,), n, device=q.device) if padding_mask is None else (~padding_mask).sum(1)
    groups = chunk_count(n, row_length)
    position = torch.arange(groups * row_length, device=q.device).view(groups, row_length)
    return position >= real[:, None, None]
