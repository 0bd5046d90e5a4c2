"""Softmax attention, literally: the weights of one query at a time."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def softmax_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d) v, one query at a time; shapes and masks as in ``softmax_attention``. For comparison only."""
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for i in real_tokens(query_padding_mask, b, q.shape[2]):
            seen = [j for j in keys if not causal or j <= i]
            if seen:
                scores = (q[b, :, i, None] * k[b, :, seen]).sum(-1) / q.shape[3] ** 0.5  # (H, seen)
                rows[i] = (scores.softmax(-1).unsqueeze(-1) * v[b, :, seen]).sum(1)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)
