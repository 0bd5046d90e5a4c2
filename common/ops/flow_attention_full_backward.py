"""The derivative of Flow-Attention of all sinks with all sources, by hand. Legend: ``flow_attention``.

dx is the gradient of x. With δ_i = dR_i·R_i, equation 8 needs no product of its own for the weights of sinks: δ_i is
the gradient of log r_i and, up to its sign, of log I_i; likewise γ_j = v_j·dv_j is that of the competition's logarithm.
"""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from .chunks import zero_padding
from .feature_maps import feature_map_gradient, real_features
from .flow_attention_full import FullFlow, dot, sink_weights, token_count, weighted_sum
from .flow_options import FlowForm, FlowOptions


def full_backward(
    grad_out: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    options: FlowOptions,
    kept: Sequence[Tensor],
    grads: Tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill ``grads``, of q (B, H, n, d), k (B, H, m, d) and v (B, H, m, e), from that of ``out`` (B, H, n, e).

    ``kept``: the fields of ``FullFlow`` after the features, and the context (B, H, d, e). O(n d e) time.
    """
    form = options.form
    q = real_features(q, options.phi, query_padding_mask)
    k = real_features(k, options.phi, key_padding_mask)
    v = zero_padding(v, key_padding_mask)
    flow, context = FullFlow(q, k, *kept[:-1]), kept[-1]

    # Equation 8, and from its weights to the conserved flows.
    scaled = grad_out * sink_weights(flow)
    delta = (grad_out * out).sum(-1)  # (B, H, n)
    d_conserved_incoming = _flow_gradient(delta, flow.allocation, options.allocation)
    if form.rescale:
        counts = token_count(q, query_padding_mask), token_count(k, key_padding_mask)
        d_conserved_incoming = d_conserved_incoming * (counts[0] / counts[1])
    d_context = q.transpose(-2, -1) @ scaled  # (B, H, d, e)
    d_values = k @ d_context  # (B, H, m, e), of v times its competition
    gamma = (d_values * v).sum(-1) * flow.competition  # (B, H, m)
    torch.mul(d_values, flow.competition.unsqueeze(-1), out=grads[2])
    d_conserved_outgoing = _flow_gradient(gamma, flow.competition, options.competition)
    d_conserved_outgoing = d_conserved_outgoing.masked_fill(
        flow.conserved_outgoing > options.clamp, 0.0
    )  # no flow is negative

    # Equations 6-7, then 4-5.
    d_sum_k_over_outgoing = _given_gradient(q, d_conserved_incoming, form)  # (B, H, d)
    d_sum_q_over_incoming = _given_gradient(k, d_conserved_outgoing, form)
    per_incoming, per_outgoing = 1.0 / flow.incoming, 1.0 / flow.outgoing
    d_incoming = -(delta + dot(q, d_sum_q_over_incoming) * per_incoming) * per_incoming
    d_outgoing = -dot(k, d_sum_k_over_outgoing) * per_outgoing.square()
    d_sum_k, d_sum_q = _given_gradient(q, d_incoming, form), _given_gradient(k, d_outgoing, form)

    dq = scaled @ context.transpose(-2, -1)
    weights = d_conserved_incoming, d_incoming, per_incoming, torch.ones_like(per_incoming)
    _add_products(dq, weights, (flow.sum_k_over_outgoing, flow.sum_k, d_sum_q_over_incoming, d_sum_q))
    feature_map_gradient(dq, q, options.phi, out=grads[0])
    dk = (v * flow.competition.unsqueeze(-1)) @ d_context.transpose(-2, -1)
    weights = d_conserved_outgoing, d_outgoing, per_outgoing, torch.ones_like(per_outgoing)
    _add_products(dk, weights, (flow.sum_q_over_incoming, flow.sum_q, d_sum_k_over_outgoing, d_sum_k))
    feature_map_gradient(dk, k, options.phi, out=grads[1])


def _flow_gradient(log_gradient: Tensor, weights: Tensor, kind: str) -> Tensor:
    """The gradient of a conserved flow from that of the logarithm of its weights, all (B, H, tokens)."""
    if kind == "none":
        return torch.zeros_like(log_gradient)
    if kind == "sigmoid":
        return log_gradient * (1.0 - weights)
    shares = weights / weights.sum(-1, keepdim=True)  # the softmax may have been multiplied by a count
    return log_gradient - shares * log_gradient.sum(-1, keepdim=True)


def _given_gradient(receivers: Tensor, gradient: Tensor, form: FlowForm) -> Tensor:
    """The gradient (B, H, d) of what is given, from that of what receivers (B, H, r, d) get of it (B, H, r)."""
    return weighted_sum(receivers, gradient) + form.eps * gradient.sum(-1, keepdim=True)


def _add_products(x: Tensor, weights: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    """Add Σ weight·vector to x (B, H, n, d) in place, for weights (B, H, n) and vectors (B, H, d)."""
    columns, rows = torch.stack(weights, dim=-2).transpose(-2, -1), torch.stack(vectors, dim=-2)
    # (B, H, n, 4) @ (B, H, 4, d); a view, not flatten, which may copy
    x.view(-1, *x.shape[2:]).baddbmm_(columns.flatten(0, 1), rows.flatten(0, 1))
