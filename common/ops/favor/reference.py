"""FAVOR+, literally: the features as the paper has them, and every weighted sum written out for each query."""

import torch
from torch import Tensor

from ..shared.reference_tools import kept, real_tokens


def favor_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Choromanski et al. 2021, section 2.3, one query at a time; shapes as in ``favor_attention``.

    O(n m (r + e)): for comparison only; exponents may overflow.
    """
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for i in real_tokens(query_padding_mask, b, q.shape[2]):
            sources = [j for j in keys if not causal or j <= i]
            if not sources:
                continue
            products = _features(q[b, :, i : i + 1], directions) * _features(k[b, :, sources], directions)
            weights = (products * kept(log_decay, b, keys, i, sources)).sum(-1)  # (H, sources)
            total = (weights.unsqueeze(-1) * v[b, :, sources]).sum(1)  # (H, e)
            rows[i] = total / weights.sum(-1, keepdim=True)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def _features(x: Tensor, directions: Tensor) -> Tensor:
    """phi(x): (..., d) -> (..., r)."""
    x = x / x.shape[-1] ** 0.25
    exponents = x @ directions.to(x.dtype).T - (x**2).sum(-1, keepdim=True) / 2
    return torch.exp(exponents) / len(directions) ** 0.5
