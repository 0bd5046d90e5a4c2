"""Combiner with a row-major axial factorisation, literally: every weight of every query written out."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def row_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, row_length: int, key_padding_mask: Tensor | None = None
) -> Tensor:
    """The values of the summaries, arguments as in ``row_attention``. For comparison only."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        real = real_tokens(key_padding_mask, b, q.shape[2])
        for position, i in enumerate(real):
            start = position - position % row_length
            row = real[start : start + row_length]
            scores = torch.stack([(q[b, :, i] * k[b, :, j]).sum(-1) for j in row]) / math.sqrt(q.shape[3])  # (R, H)
            weights = scores.softmax(0)
            out = out.clone()
            out[b, :, i] = sum(weight[:, None] * v[b, :, j] for weight, j in zip(weights, row))
    return out


def combiner_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_k: Tensor,
    summary_v: Tensor,
    *,
    row_length: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """The joint softmax, one query at a time; arguments as in ``combiner_attention``. For comparison only."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        real = real_tokens(key_padding_mask, b, q.shape[2])
        for position, i in enumerate(real):
            row, column = divmod(position, row_length)
            near = [real[p] for p in range(len(real)) if p // row_length == row and (not causal or p <= position)]
            far = [
                real[p] for p in range(len(real)) if p % row_length == column and (not causal or p // row_length < row)
            ]
            keys = [k[b, :, j] for j in near] + [summary_k[b, :, j] for j in far]
            values = [v[b, :, j] for j in near] + [summary_v[b, :, j] for j in far]
            scores = torch.stack([(q[b, :, i] * key).sum(-1) for key in keys]) / math.sqrt(q.shape[3])
            weights = scores.softmax(0)  # (sources, H)
            out = out.clone()
            out[b, :, i] = sum(weight[:, None] * value for weight, value in zip(weights, values))
    return out
