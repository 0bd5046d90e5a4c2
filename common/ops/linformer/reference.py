"""Linformer, literally: each sum of keys and values written out, then softmax attention to them."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens, weights_of


def linformer_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Wang et al. 2020, equation 7, one query at a time; shapes as in ``linformer_attention``. For comparison only."""
    out = []
    for b in range(q.shape[0]):
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        for h in range(q.shape[1]):
            few_k, few_v = q.new_zeros(key_rows.shape[1], q.shape[3]), v.new_zeros(key_rows.shape[1], v.shape[3])
            for position, j in enumerate(keys):
                few_k = few_k + torch.outer(key_rows[position].to(k.dtype), k[b, h, j])
                few_v = few_v + torch.outer(value_rows[position].to(v.dtype), v[b, h, j])
            rows = [torch.zeros_like(v[b, h, 0]) for _ in range(q.shape[2])]
            for i in queries:
                rows[i] = weights_of(few_k @ q[b, h, i] / q.shape[3] ** 0.5, "softmax") @ few_v
            out.append(torch.stack(rows))
    return torch.stack(out).unflatten(0, q.shape[:2])  # (B, H, n, e)
