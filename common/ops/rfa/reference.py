"""Random feature attention, literally: the recurrence token by token, or every weighted sum written out."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def rfa_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    log_gate: Tensor | None = None,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    floor: float = 1.0,
) -> Tensor:
    """Peng et al. 2021, equations 5 and 6, and 8 with ``log_gate``; shapes as in ``rfa_attention``.

    For comparison only: O(n r e) as a loop.
    """
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = real_tokens(query_padding_mask, b, q.shape[2])
        phi_q, phi_k = _features(q[b], directions), _features(k[b], directions)  # (H, n, 2r)
        s, z = phi_k.new_zeros(*phi_k.shape[::2], v.shape[3]), phi_k.new_zeros(*phi_k.shape[::2])
        rows = []
        if not causal:
            for j in keys:
                s, z = s + phi_k[:, j, :, None] * v[b, :, j, None, :], z + phi_k[:, j]
        for i in range(q.shape[2]):
            if causal and i in keys:
                if log_decay is not None:
                    decay = log_decay[b, :, i].exp().reshape(len(z), -1)  # (H, 1) or (H, 2r)
                    s, z = decay[..., None] * s, decay * z
                g = None if log_gate is None else log_gate[b, :, i, None].exp()  # (H, 1)
                new_s, new_z = phi_k[:, i, :, None] * v[b, :, i, None, :], phi_k[:, i]
                s = s + new_s if g is None else g[..., None] * s + (1 - g[..., None]) * new_s
                z = z + new_z if g is None else g * z + (1 - g) * new_z
            if i not in queries:
                rows.append(torch.zeros_like(v[b, :, 0]))
                continue
            normaliser = torch.clamp((phi_q[:, i] * z).sum(-1, keepdim=True), min=floor)  # (H, 1)
            rows.append((phi_q[:, i, :, None] * s).sum(1) / normaliser)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def rfa_gate_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, directions: Tensor, gate_weight: Tensor, gate_bias: Tensor, **options
) -> Tensor:
    """RFA-Gate, section 3.2: ``rfa_attention_reference`` with the gate sigmoid(w·x + b) of each head, x (B, n, D)."""
    scores = [(x * row).sum(-1) + bias for row, bias in zip(gate_weight, gate_bias)]
    log_gate = -torch.log(1 + torch.exp(-torch.stack(scores, dim=1)))  # (B, H, n)
    return rfa_attention_reference(q, k, v, directions, log_gate=log_gate, **options)


def _features(x: Tensor, directions: Tensor) -> Tensor:
    """phi(x): (H, n, d) -> (H, n, 2r)."""
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    projected = torch.einsum("hnd,hrd->hnr", x, directions.to(x.dtype))
    return torch.cat([torch.sin(projected), torch.cos(projected)], dim=-1) / directions.shape[1] ** 0.5
