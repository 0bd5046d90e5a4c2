"""Gated linear attention, literally: the recurrence token by token."""

import torch
from torch import Tensor

from ..shared.reference_tools import by_head, real_tokens


def gla_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    gate_down: Tensor,
    gate_up: Tensor,
    gate_bias: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    temperature: float = 16.0,
) -> Tensor:
    """Yang et al. 2024, equation 3 with section 4.4's gate; shapes as in ``gla_attention``.

    For comparison only: O(n d e) as a loop.
    """
    logits = torch.einsum("bnd,rd,cr->bnc", x, gate_down, gate_up) + gate_bias
    alpha = by_head((1 / (1 + torch.exp(-logits))) ** (1 / temperature), q.shape[1])  # (B, H, n, d)
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        s, rows = torch.zeros_like(k[b, :, 0, :, None] * v[b, :, 0, None, :]), []  # (H, d, e)
        for t in range(q.shape[2]):
            if t in keys:
                s = alpha[b, :, t, :, None] * s + k[b, :, t, :, None] * v[b, :, t, None, :]
            read = (q[b, :, t, :, None] * s).sum(1) / q.shape[3] ** 0.5
            rows.append(read if t in queries else torch.zeros_like(read))
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)
