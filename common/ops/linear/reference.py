"""Linear attention, literally: every normaliser and every weighted sum written out for each query."""

import torch
from torch import Tensor

from ..shared.feature_maps import feature_map
from .interface import EPS


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    phi: str = "elu+1",
) -> Tensor:
    """Katharopoulos et al. 2020, equations 5 and 9, one query at a time; shapes as in ``linear_attention``.

    O(n m (d + e)): for comparison only. Padded tokens are left out of every sum.
    """
    rows = []
    for b in range(q.shape[0]):
        real_key = torch.ones(k.shape[2], dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask[b].cpu()
        outputs = []
        for i in range(q.shape[2]):
            sources = [j for j in range(k.shape[2]) if real_key[j] and (not causal or j <= i)]
            padded = query_padding_mask is not None and bool(query_padding_mask[b, i])
            if padded or not sources:
                outputs.append(torch.zeros_like(v[b, :, 0]))  # (H, e)
                continue
            query, keys = feature_map(q[b, :, i : i + 1], phi), feature_map(k[b, :, sources], phi)
            weights = (keys * query).sum(-1)  # (H, sources)
            total = (weights.unsqueeze(-1) * v[b, :, sources]).sum(1)  # (H, e)
            outputs.append(total / (weights.sum(-1, keepdim=True) + EPS))
        rows.append(torch.stack(outputs, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)
