"""YOSO-E, literally: the probability of equal hashes written out for each query and key."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def yoso_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    tau: int = 9,
    gradient: str = "bound",
) -> Tensor:
    """Zeng et al. 2021, section 3, one query at a time; shapes as in ``yoso_attention``.

    O(n m (d + e)): for comparison only.
    """
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for i in real_tokens(query_padding_mask, b, q.shape[2]):
            sources = [j for j in keys if not causal or j <= i]
            if not sources:
                continue
            cosines = (_unit(q[b, :, i : i + 1]) * _unit(k[b, :, sources])).sum(-1)  # (H, sources)
            cosines = torch.clamp(cosines, -0.999999, 0.999999)
            weights = (1 - torch.arccos(cosines) / math.pi) ** tau
            if gradient == "bound":
                weights = weights.detach() + tau / 2 * weights.detach() * (cosines - cosines.detach())
            total = (weights.unsqueeze(-1) * v[b, :, sources]).sum(1)  # (H, e)
            rows[i] = _unit(total)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def _unit(x: Tensor) -> Tensor:
    return x / torch.clamp(x.norm(dim=-1, keepdim=True), min=1e-12)
