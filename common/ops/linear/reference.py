"""Linear attention, literally: every normaliser and every weighted sum written out for each query."""

import torch
from torch import Tensor

from ..shared.reference_tools import kept, positive_features, real_tokens


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    phi: str = "elu+1",
) -> Tensor:
    """Katharopoulos et al. 2020, equations 5 and 9, one query at a time; shapes as in ``linear_attention``.

    O(n m (d + e)): for comparison only. Padded tokens are in no sum, and their gates are not applied.
    """
    rows = []
    for b in range(q.shape[0]):
        keys, outputs = real_tokens(key_padding_mask, b, k.shape[2]), []
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        for i in range(q.shape[2]):
            sources = [j for j in keys if not causal or j <= i]
            if i not in queries or not sources:
                outputs.append(torch.zeros_like(v[b, :, 0]))  # (H, e)
                continue
            products = positive_features(k[b, :, sources], phi) * positive_features(q[b, :, i, None], phi)
            weights = (products * kept(log_decay, b, keys, i, sources)).sum(-1)
            total = (weights.unsqueeze(-1) * v[b, :, sources]).sum(1)  # (H, e), from weights (H, sources)
            outputs.append(total / (weights.sum(-1, keepdim=True) + 1e-6))
        rows.append(torch.stack(outputs, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)
