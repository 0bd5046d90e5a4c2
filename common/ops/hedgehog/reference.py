"""Hedgehog, literally: every feature, normaliser and weighted sum written out for each query."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def hedgehog_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """One query at a time; shapes as in ``hedgehog_attention``. O(n m r (d + e)): for comparison only."""

    def features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # (H, d) -> (H, 2r)
        mapped = (weight * x.unsqueeze(1)).sum(-1) + bias
        up, down = torch.exp(mapped), torch.exp(-mapped)
        return torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], dim=-1)

    rows = []
    for b in range(q.shape[0]):
        keys, queries = real_tokens(key_padding_mask, b, k.shape[2]), real_tokens(query_padding_mask, b, q.shape[2])
        outputs = []
        for i in range(q.shape[2]):
            total, normaliser = torch.zeros_like(v[b, :, 0]), torch.zeros_like(v[b, :, 0, :1])  # (H, e), (H, 1)
            for j in keys if i in queries else []:
                if not causal or j <= i:
                    query = features(q[b, :, i], query_weight, query_bias)
                    weight = (query * features(k[b, :, j], key_weight, key_bias)).sum(-1, keepdim=True)
                    total, normaliser = total + weight * v[b, :, j], normaliser + weight
            outputs.append(total / (normaliser + 1e-6))
        rows.append(torch.stack(outputs, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)
