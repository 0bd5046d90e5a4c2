"""Flow-Attention of all sinks with all sources: Flowformer (ICML 2022), equations 4-8 and Algorithm 1.

Legend: ``flow_attention``.
"""

from typing import Optional

import torch
from torch import Tensor

from .chunks import compute_dtype, zero_padding
from .feature_maps import real_features
from .flow_options import Flow, FlowForm, FlowOptions, bounded, dot, positive


def flow_attention_scriptable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    options: FlowOptions,
) -> Tensor:
    """``flow_attention`` with ``causal=False`` for callers inside TorchScript, which has no union of result types.

    Arguments are not checked; shapes, masks, cost as in ``flow_attention``.
    """
    dtype = compute_dtype(q)
    flow = full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
    return _aggregate(flow, zero_padding(v.to(dtype), key_padding_mask)).to(v.dtype)


def _count(x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
    """Real tokens of each row, at least 1, (B or 1, 1, 1), for x (B, H, tokens, d)."""
    if padding_mask is None:
        return torch.full([1, 1, 1], x.shape[2], dtype=x.dtype, device=x.device)
    return (~padding_mask).sum(1).clamp(min=1).to(x.dtype)[:, None, None]


def _received(receivers: Tensor, givers: Tensor, weights: Optional[Tensor], form: FlowForm) -> Tensor:
    """What each receiver (B, H, r, d) gets from all givers (B, H, g, d), weighted (B, H, g): (B, H, r)."""
    if weights is None:
        given = givers.sum(2)
    else:
        given = dot(givers.transpose(-2, -1), weights)  # (B, H, d)
    given = given + form.eps
    # (receivers + eps)·given without a second (r, d) tensor
    return dot(receivers, given) + form.eps * given.sum(-1, keepdim=True) + form.outer_eps


def full_flow(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    options: FlowOptions,
) -> Flow:
    """Equations 4-7 over all sinks and sources; q (B, H, n, d), k (B, H, m, d)."""
    form = options.form
    q = real_features(q, options.phi, query_padding_mask)
    k = real_features(k, options.phi, key_padding_mask)
    sinks, sources = _count(q, query_padding_mask), _count(k, key_padding_mask)
    incoming = positive(_received(q, k, None, form))  # I (B, H, n)
    outgoing = positive(_received(k, q, None, form))  # O (B, H, m)
    conserved_incoming = _received(q, k, 1.0 / outgoing, form)  # Î (B, H, n)
    conserved_outgoing = bounded(_received(k, q, 1.0 / incoming, form), options.clamp)  # Ô (B, H, m)
    if form.rescale:
        conserved_incoming = conserved_incoming * (sinks / sources)
    return Flow(
        q,
        k,
        incoming,
        _weight(conserved_outgoing, options.competition, key_padding_mask, sources if form.rescale else None),
        _weight(conserved_incoming, options.allocation, query_padding_mask, sinks if form.rescale else None),
    )


def _weight(flow: Tensor, kind: str, padding_mask: Optional[Tensor], scale: Optional[Tensor]) -> Tensor:
    """Competition or allocation weights from a conserved flow, (B, H, tokens) -> (B, H, tokens)."""
    if kind == "none":
        return torch.ones_like(flow)
    if kind == "sigmoid":
        return torch.sigmoid(flow)
    if padding_mask is not None:
        flow = flow.masked_fill(padding_mask[:, None], -1e30)  # finite: -inf makes a row of padding NaN
    weights = torch.softmax(flow, dim=-1)
    return weights if scale is None else weights * scale


def _aggregate(flow: Flow, v: Tensor) -> Tensor:
    """Equation 8: (B, H, n, e) from v (B, H, m, e)."""
    context = flow.k.transpose(-2, -1) @ (v * flow.competition.unsqueeze(-1))  # (B, H, d, e)
    return (flow.q @ context) * (flow.allocation / flow.incoming).unsqueeze(-1)
