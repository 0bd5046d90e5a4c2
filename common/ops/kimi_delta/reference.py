"""Kimi Delta Attention, literally: one matrix of memory for each head, token by token."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def kimi_delta_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    qk_activation: str = "silu",
    qk_norm: str = "l2",
    v_activation: str = "silu",
) -> Tensor:
    """Kimi Team 2025, equation 1 over √d, with S_t (d, e) as in the paper; shapes as in ``kimi_delta_attention``.

    For comparison only: O(n d² e).
    """

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    if qk_activation == "silu":
        q, k = silu(q), silu(k)
    if qk_norm == "l2":
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    v = silu(v) if v_activation == "silu" else v
    channels, out = q.shape[3], []
    for b in range(q.shape[0]):
        keys, queries = real_tokens(key_padding_mask, b, k.shape[2]), real_tokens(query_padding_mask, b, q.shape[2])
        rows = []
        for h in range(q.shape[1]):
            s, head = v.new_zeros(channels, v.shape[3]), []
            for t in range(q.shape[2]):
                if t in keys:
                    erase = torch.eye(channels, dtype=q.dtype) - beta[b, h, t] * torch.outer(k[b, h, t], k[b, h, t])
                    s = erase @ torch.diag(torch.exp(log_decay[b, h, t])) @ s
                    s = s + beta[b, h, t] * torch.outer(k[b, h, t], v[b, h, t])
                head.append(s.T @ q[b, h, t] / channels**0.5 if t in queries else torch.zeros_like(v[b, h, t]))
            rows.append(torch.stack(head))
        out.append(torch.stack(rows))
    return torch.stack(out)  # (B, H, n, e)
