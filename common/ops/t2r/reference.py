"""T2R, literally: every feature, normaliser and weighted sum written out for each query."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def t2r_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_weight: Tensor,
    map_bias: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    floor: float = 1e-2,
) -> Tensor:
    """Kasai et al. 2021, equations 3 and 4, one query at a time; shapes as in ``t2r_attention``.

    O(n m f (d + e)): for comparison only. Padded tokens are in no sum.
    """

    def phi(x: Tensor) -> Tensor:  # (H, d) -> (H, f)
        mapped = (map_weight * x.unsqueeze(1)).sum(-1) + map_bias
        return torch.where(mapped > 0, mapped, 0)

    rows = []
    for b in range(q.shape[0]):
        keys, queries = real_tokens(key_padding_mask, b, k.shape[2]), real_tokens(query_padding_mask, b, q.shape[2])
        outputs = []
        for i in range(q.shape[2]):
            total, normaliser = torch.zeros_like(v[b, :, 0]), torch.zeros_like(v[b, :, 0, :1])  # (H, e), (H, 1)
            for j in keys if i in queries else []:
                if not causal or j <= i:
                    weight = (phi(q[b, :, i] / math.sqrt(q.shape[3])) * phi(k[b, :, j])).sum(-1, keepdim=True)
                    total, normaliser = total + weight * v[b, :, j], normaliser + weight
            outputs.append(total / torch.where(normaliser > floor, normaliser, floor))
        rows.append(torch.stack(outputs, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)
