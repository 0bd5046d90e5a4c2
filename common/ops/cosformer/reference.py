"""cosFormer, literally: every weight and every weighted sum written out for each query."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import kept, real_tokens


def cosformer_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_tokens: int,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    phi: str = "relu",
) -> Tensor:
    """Qin et al. 2022, equation 8, one query at a time; shapes as in ``cosformer_attention``.

    O(n m (d + e)): for comparison only. Positions count the real tokens of a row. In the causal case these are the real
    keys, whichever queries are padding.
    """
    out = []
    for b in range(q.shape[0]):
        real_queries = real_tokens(query_padding_mask, b, q.shape[2])
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = keys if causal else real_queries
        places = torch.tensor([position for position, _ in enumerate(keys, 1)], dtype=q.dtype)
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for position, i in enumerate(queries, 1):
            seen = [index for index, j in enumerate(keys) if not causal or j <= i]
            if not seen or i not in real_queries:
                continue
            sources = [keys[index] for index in seen]
            products = _phi(q[b, :, i : i + 1], phi) * _phi(k[b, :, sources], phi)  # (H, sources, d)
            products = (products * kept(log_decay, b, keys, i, sources)).sum(-1)
            weights = products * torch.cos(math.pi / 2 * (position - places[seen]) / max_tokens)
            total = (weights.unsqueeze(-1) * v[b, :, sources]).sum(1)  # (H, e)
            rows[i] = total / torch.clamp(weights.sum(-1, keepdim=True), min=1e-6)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def _phi(x: Tensor, phi: str) -> Tensor:
    return torch.clamp(x, min=0.0) if phi == "relu" else torch.where(x > 0, x + 1.0, torch.exp(x))
