"""The gated delta rule, literally: one matrix of memory for each head, token by token."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def gated_delta_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    qk_activation: str = "silu",
    qk_norm: str = "l2",
    v_activation: str = "silu",
) -> Tensor:
    """Yang et al. 2025, section 3.1, with S_t (e, d) as in the paper; shapes as in ``gated_delta_attention``.

    For comparison only: O(n d² e).
    """
    q, k = (_normalised(_activated(x, qk_activation), qk_norm) for x in (q, k))
    q, v = q / q.shape[3] ** 0.5, _activated(v, v_activation)
    identity = torch.eye(q.shape[3], dtype=q.dtype, device=q.device)
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        memory = v.new_zeros(v.shape[1], v.shape[3], k.shape[3])  # (H, e, d)
        rows = []
        for t in range(q.shape[2]):
            if t in keys:
                k_t, v_t, beta_t = k[b, :, t], v[b, :, t], beta[b, :, t, None, None]
                alpha_t = 1.0 if log_decay is None else torch.exp(log_decay[b, :, t, None, None])
                erased = identity - beta_t * torch.einsum("hi,hj->hij", k_t, k_t)
                memory = alpha_t * torch.einsum("hei,hij->hej", memory, erased)
                memory = memory + beta_t * torch.einsum("he,hj->hej", v_t, k_t)
            read = torch.einsum("hej,hj->he", memory, q[b, :, t])
            rows.append(read if t in queries else torch.zeros_like(read))
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def _activated(x: Tensor, activation: str) -> Tensor:
    """silu(x), or x for "none"."""
    return x / (1 + torch.exp(-x)) if activation == "silu" else x


def _normalised(x: Tensor, norm: str) -> Tensor:
    """x / √(|x|² + 1e-6) for "l2", or x for "none"."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) if norm == "l2" else x
