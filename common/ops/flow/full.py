"""Flow-Attention of all sinks with all sources in plain PyTorch: Flowformer (ICML 2022), Eq. 4-8 and Algorithm 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.feature_maps import real_features
from ..shared.padding import zero_padding
from ..shared.precision import compute_dtype
from .options import FlowForm, FlowOptions, clamp_flow, excluded_logit, replace_zero_by_one


class FullFlow(NamedTuple):
    """The flows of equations 4-7, and the sums over all sinks or sources from which they are computed."""

    q: Tensor  # features of the sinks (B, H, n, d), zero at padding
    k: Tensor  # features of the sources (B, H, m, d), zero at padding
    incoming: Tensor  # I (B, H, n)
    outgoing: Tensor  # O (B, H, m)
    conserved_outgoing: Tensor  # Ô (B, H, m), before its clamp
    competition: Tensor  # weight of every source (B, H, m)
    allocation: Tensor  # weight of every sink (B, H, n)
    sum_k: Tensor  # (B, H, d); this sum and the three below have the form's epsilon added
    sum_q: Tensor  # (B, H, d)
    sum_k_over_outgoing: Tensor  # (B, H, d)
    sum_q_over_incoming: Tensor  # (B, H, d)


def flow_attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: FlowOptions,
) -> Tensor:
    """``flow_attention`` with ``causal=False`` in plain PyTorch, for tracing, function transforms and scripting.

    Arguments are not checked; shapes, masks, cost as in ``flow_attention``.
    """
    dtype = compute_dtype(q)
    flow = full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
    context = full_context(flow, zero_padding(v.to(dtype), key_padding_mask))
    return ((flow.q @ context) * sink_weights(flow)).to(v.dtype)


def full_flow(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: FlowOptions,
) -> FullFlow:
    """Equations 4-7 over all sinks and sources; q (B, H, n, d), k (B, H, m, d)."""
    form = options.form
    q = real_features(q, options.phi, query_padding_mask)
    k = real_features(k, options.phi, key_padding_mask)
    sinks, sources = token_count(q, query_padding_mask), token_count(k, key_padding_mask)
    sum_k, sum_q = k.sum(2) + form.eps, q.sum(2) + form.eps
    outgoing = replace_zero_by_one(_received(k, sum_q, form))
    sum_k_over_outgoing = weighted_sum(k, 1.0 / outgoing) + form.eps
    incoming, conserved_incoming = sink_flows(q, sum_k, sum_k_over_outgoing, form)
    sum_q_over_incoming = weighted_sum(q, 1.0 / incoming) + form.eps
    conserved_outgoing = _received(k, sum_q_over_incoming, form)
    if form.rescale:
        conserved_incoming = conserved_incoming * (sinks / sources)
    competing = clamp_flow(conserved_outgoing, options.clamp)
    return FullFlow(
        q,
        k,
        incoming,
        outgoing,
        conserved_outgoing,
        flow_weight(competing, options.competition, key_padding_mask, sources if form.rescale else None),
        flow_weight(conserved_incoming, options.allocation, query_padding_mask, sinks if form.rescale else None),
        sum_k,
        sum_q,
        sum_k_over_outgoing,
        sum_q_over_incoming,
    )


def sink_flows(q: Tensor, sum_k: Tensor, sum_k_over_outgoing: Tensor, form: FlowForm) -> tuple[Tensor, Tensor]:
    """I and Î (B, H, n) of sinks with features q (B, H, n, d), from sums (B, H, d) with the form's epsilon added."""
    return replace_zero_by_one(_received(q, sum_k, form)), _received(q, sum_k_over_outgoing, form)


def full_context(flow: FullFlow, v: Tensor) -> Tensor:
    """Σ_j k_jᵀ w_j v_j of equation 8: (B, H, d, e) from v (B, H, m, e), zero at padding."""
    return flow.k.transpose(-2, -1) @ (v * flow.competition.unsqueeze(-1))


def sink_weights(flow: FullFlow) -> Tensor:
    """The weight of each sink in equation 8, allocation / I: (B, H, n, 1)."""
    return (flow.allocation / flow.incoming).unsqueeze(-1)


def dot(x: Tensor, vector: Tensor) -> Tensor:
    """x (B, H, n, d) · vector (B, H, d) -> (B, H, n)."""
    return weighted_sum(x.transpose(-2, -1), vector)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i x_i for x (B, H, n, d), weights (B, H, n): (B, H, d)."""
    if torch.jit.is_scripting():
        # Autocast cannot be switched off inside TorchScript; unlike a product, a sum stays float32 under it.
        return (x * weights.unsqueeze(-1)).sum(2)
    # A row times a matrix: batched products with a single column are several times slower.
    return (weights.unsqueeze(-2) @ x).squeeze(-2)


def _received(receivers: Tensor, giver_sum: Tensor, form: FlowForm) -> Tensor:
    """The flow into each receiver (B, H, r, d) from all givers, whose sum is (B, H, d): (B, H, r)."""
    # (receivers + eps) · giver_sum without a second (r, d) tensor
    return dot(receivers, giver_sum) + form.eps * giver_sum.sum(-1, keepdim=True) + form.outer_eps


def token_count(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Real tokens of each row, at least 1, (B or 1, 1, 1), for x (B, H, tokens, d)."""
    if padding_mask is None:
        return torch.full([1, 1, 1], x.shape[2], dtype=x.dtype, device=x.device)
    return (~padding_mask).sum(1).clamp(min=1).to(x.dtype)[:, None, None]


def flow_weight(flow: Tensor, kind: str, padding_mask: Tensor | None, scale: Tensor | None) -> Tensor:
    """Competition or allocation weights from a conserved flow, (B, H, tokens) -> (B, H, tokens)."""
    if kind == "none":
        return torch.ones_like(flow)
    if kind == "sigmoid":
        return torch.sigmoid(flow)
    if kind == "softmax_heads":
        weights = torch.softmax(flow, dim=1)
        return weights if scale is None else weights * scale
    if padding_mask is not None:
        flow = flow.masked_fill(padding_mask[:, None], excluded_logit())
    weights = torch.softmax(flow, dim=-1)
    return weights if scale is None else weights * scale
