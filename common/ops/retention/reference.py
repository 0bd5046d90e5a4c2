"""Retention, literally: the matrix of decays and each row of scores written out."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def retention_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    decays: str = "powers",
    score_norm: bool = True,
) -> Tensor:
    """Sun et al. 2023, equation 5 with "Retention Score Normalization"; arguments as in ``retention_attention``.

    One query at a time, for comparison only: O(n² (d + e)).
    """
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        heads = []
        for h in range(q.shape[1]):
            gamma, rows = _gamma(decays, h, q.shape[1]), []
            for i in range(q.shape[2]):
                row = torch.zeros_like(v[b, h, 0])
                seen = [j for j in keys if j <= i]
                if i in queries and seen:
                    # One factor γ for each real token after the key, up to the query.
                    d = torch.stack([q.new_tensor(gamma ** (len(seen) - 1 - index)) for index in range(len(seen))])
                    d = d / d.sum().sqrt() if score_norm else d
                    r = (q[b, h, i] * k[b, h, seen]).sum(-1) / math.sqrt(q.shape[3]) * d
                    r = r / torch.clamp(r.sum().abs(), min=1) if score_norm else r
                    row = (r[:, None] * v[b, h, seen]).sum(0)
                rows.append(row)
            heads.append(torch.stack(rows))
        out.append(torch.stack(heads))
    return torch.stack(out)  # (B, H, n, e)


def _gamma(decays: str, head: int, heads: int) -> float:
    """The decay of a head per token."""
    if decays == "powers":
        return 1 - 2 ** (-5 - head)
    fraction = head / (heads - 1) if heads > 1 else 0.0
    return 1 - math.exp(math.log(1 / 32) * (1 - fraction) + math.log(1 / 512) * fraction)
