"""LoLCATs, literally: the near and the far keys of each query, one at a time."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def lolcats_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    window_gate: Tensor,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    window: int,
    feature_map: str = "softmax",
    part: str = "both",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Equation 7, one query at a time; shapes as in ``lolcats_attention``. O(n² r (d + e)): for comparison only."""

    def features(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (H, d) -> (H, f)
        mapped = (weight * x.unsqueeze(1)).sum(-1)
        mapped = mapped if bias is None else mapped + bias
        if feature_map == "relu":
            return torch.where(mapped > 0, mapped, 0)
        up, down = torch.exp(mapped), torch.exp(-mapped)
        return torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], dim=-1)

    share = 1 / (1 + torch.exp(-window_gate))  # (H,)
    rows = []
    for b in range(q.shape[0]):
        real, queries = real_tokens(key_padding_mask, b, k.shape[2]), real_tokens(query_padding_mask, b, q.shape[2])
        outputs = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for i, token in enumerate(real):
            if token not in queries:
                continue
            first, last = (i - window + 1, i) if causal else (i - window // 2, i + (window - 1) // 2)
            scores = {
                j: (q[b, :, token] * k[b, :, real[j]]).sum(-1) / math.sqrt(q.shape[3])
                for j in range(len(real))
                if first <= j <= last and part != "linear"
            }
            largest = torch.stack(list(scores.values())).max(0).values if scores else None  # (H,)
            total, normaliser = torch.zeros_like(outputs[0]), torch.full_like(share, 1e-6 if part == "linear" else 0.0)
            for j, source in enumerate(real):
                if (causal and j > i) or (part == "window" and j not in scores):
                    continue
                if j in scores:
                    weight = share * torch.exp(scores[j] - largest)
                else:
                    query = features(q[b, :, token], query_weight, query_bias)
                    weight = (query * features(k[b, :, source], key_weight, key_bias)).sum(-1)
                total, normaliser = total + weight.unsqueeze(-1) * v[b, :, source], normaliser + weight
            outputs[token] = total / normaliser.unsqueeze(-1)
        rows.append(torch.stack(outputs, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)
