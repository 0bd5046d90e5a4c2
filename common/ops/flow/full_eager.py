"""Flow-Attention of all sinks with all sources in plain PyTorch, with a hand-written backward pass.

Saved for the backward pass are the inputs and the output, which exist anyway, and vectors of one number per token;
features are recomputed. ``README.md`` derives the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.feature_maps import real_features
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.tracing import runs_eagerly
from .full import (
    FullFlow,
    dot,
    flow_attention_in_graph,
    full_context,
    full_flow,
    sink_weights,
    token_count,
    weighted_sum,
)
from .options import FlowForm, FlowOptions

# Up to this many channels, sums over channels are faster where the tokens, not the channels, are adjacent in memory.
_FEW_CHANNELS = 16

_Mask = Tensor | None


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: _Mask, query_padding_mask: _Mask, options: FlowOptions
) -> Tensor:
    """``flow_attention`` with ``causal=False``, where nothing traces; arguments are not checked.

    O(n d e) time; O(n) memory per head is kept in addition to inputs, output and gradients.
    """
    return _Full.apply(q, k, v, key_padding_mask, query_padding_mask, options)


class _Full(torch.autograd.Function):
    """Both passes; masks and options have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: _Mask, query_mask: _Mask, options: FlowOptions
    ) -> Tensor:
        dtype, out = compute_dtype(q), _empty_output(q, v)
        flow = full_flow(_dense(q, dtype), _dense(k, dtype), key_mask, query_mask, options)
        context = full_context(flow, zero_padding(_dense(v, dtype), key_mask))
        torch.mul(flow.q @ context, sink_weights(flow), out=out)
        ctx.options = options
        ctx.save_for_backward(q, k, v, key_mask, query_mask, out, *flow[2:], context)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, query_mask, out, *saved = ctx.saved_tensors
        with autocast_off(q):
            if torch.is_grad_enabled() or not runs_eagerly(grad_out):
                grads = graph_gradients(
                    lambda *x: flow_attention_in_graph(*x, key_mask, query_mask, ctx.options), (q, k, v), (grad_out,)
                )
                return (*grads, None, None, None)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            dense = [_dense(x, compute_dtype(q)) for x in (grad_out, out, q, k, v)]
            _backward(*dense, key_mask, query_mask, ctx.options, saved, tuple(grads))
        return (*grads, None, None, None)


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, n, e) in the memory order of q if possible, so that a host can split and join heads without a copy."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=v.dtype)
    return v.new_empty(*q.shape[:3], v.shape[-1])


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, H, n, d) in one block of memory, heads outermost, and tokens innermost where channels are few."""
    if x.shape[-1] > _FEW_CHANNELS:
        return x.to(dtype).contiguous()
    return x.to(dtype).transpose(-2, -1).contiguous().transpose(-2, -1)


def _backward(
    grad_out: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: FlowOptions,
    saved: Sequence[Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of q (B, H, n, d), k (B, H, m, d) and v (B, H, m, e) into ``grads``.

    ``out`` (B, H, n, e) is the output and ``grad_out`` its gradient; ``saved`` are the fields of ``FullFlow`` after
    the features, and the context (B, H, d, e). O(n d e) time.
    """
    form = options.form
    q = real_features(q, options.phi, query_padding_mask)
    k = real_features(k, options.phi, key_padding_mask)
    v = zero_padding(v, key_padding_mask)
    flow, context = FullFlow(q, k, *saved[:-1]), saved[-1]

    # Equation 8, then through its weights to the conserved flows, starting with the gradient of log(allocation / I).
    scaled = grad_out * sink_weights(flow)
    grad_log_scale = (grad_out * out).sum(-1)  # (B, H, n)
    grad_conserved_incoming = _logit_gradient(grad_log_scale, flow.allocation, options.allocation)
    if form.rescale:
        counts = token_count(q, query_padding_mask), token_count(k, key_padding_mask)
        grad_conserved_incoming = grad_conserved_incoming * (counts[0] / counts[1])
    grad_context = q.transpose(-2, -1) @ scaled  # (B, H, d, e)
    grad_values = k @ grad_context  # (B, H, m, e), of v times its competition
    grad_log_competition = (grad_values * v).sum(-1) * flow.competition  # (B, H, m)
    torch.mul(grad_values, flow.competition.unsqueeze(-1), out=grads[2])
    grad_conserved_outgoing = _logit_gradient(grad_log_competition, flow.competition, options.competition)
    grad_conserved_outgoing = grad_conserved_outgoing.masked_fill(
        flow.conserved_outgoing > options.clamp, 0.0
    )  # no flow is negative

    # Equations 7 and 5, then 4.
    grad_sum_k_over_outgoing = _sum_gradient(q, grad_conserved_incoming, form)  # (B, H, d)
    grad_sum_q_over_incoming = _sum_gradient(k, grad_conserved_outgoing, form)
    per_incoming, per_outgoing = 1.0 / flow.incoming, 1.0 / flow.outgoing
    grad_incoming = -(grad_log_scale + dot(q, grad_sum_q_over_incoming) * per_incoming) * per_incoming
    grad_outgoing = -dot(k, grad_sum_k_over_outgoing) * per_outgoing.square()
    grad_sum_k, grad_sum_q = _sum_gradient(q, grad_incoming, form), _sum_gradient(k, grad_outgoing, form)

    grad_q = scaled @ context.transpose(-2, -1)
    weights = grad_conserved_incoming, grad_incoming, per_incoming, torch.ones_like(per_incoming)
    _add_products(grad_q, weights, (flow.sum_k_over_outgoing, flow.sum_k, grad_sum_q_over_incoming, grad_sum_q))
    _map_gradient(grad_q, q, options.phi, out=grads[0])
    grad_k = (v * flow.competition.unsqueeze(-1)) @ grad_context.transpose(-2, -1)
    weights = grad_conserved_outgoing, grad_outgoing, per_outgoing, torch.ones_like(per_outgoing)
    _add_products(grad_k, weights, (flow.sum_q_over_incoming, flow.sum_q, grad_sum_k_over_outgoing, grad_sum_k))
    _map_gradient(grad_k, k, options.phi, out=grads[1])


def _map_gradient(grad: Tensor, features: Tensor, phi: str, out: Tensor) -> None:
    """Write the gradient of x into ``out``, from that of ``features`` = phi(x); 0 at padding, where these are 0.

    All have the same shape; O(size of x). ``grad`` may exceed float16's range at padding, so that nothing is rounded
    to ``out``'s dtype before the product with the slope: on a GPU, sigmoid_backward rounds its inputs.
    """
    if phi == "sigmoid" and out.dtype == grad.dtype:
        torch.ops.aten.sigmoid_backward.grad_input(grad, features, grad_input=out)
    elif phi == "sigmoid":
        out.copy_(torch.ops.aten.sigmoid_backward(grad, features))
    elif phi == "elu+1":
        torch.mul(grad, features.clamp(max=1.0), out=out)
    else:
        torch.mul(grad, features > 1e-6, out=out)


def _logit_gradient(log_gradient: Tensor, weights: Tensor, kind: str) -> Tensor:
    """The gradient of a conserved flow from that of the logarithm of its weights, all (B, H, tokens)."""
    if kind == "none":
        return torch.zeros_like(log_gradient)
    if kind == "sigmoid":
        return log_gradient * (1.0 - weights)
    over = 1 if kind == "softmax_heads" else -1
    shares = weights / weights.sum(over, keepdim=True)  # the softmax may have been multiplied by a count
    return log_gradient - shares * log_gradient.sum(over, keepdim=True)


def _sum_gradient(receivers: Tensor, gradient: Tensor, form: FlowForm) -> Tensor:
    """The gradient of the givers' sum (B, H, d) from that of the flow (B, H, r) into receivers (B, H, r, d)."""
    return weighted_sum(receivers, gradient) + form.eps * gradient.sum(-1, keepdim=True)


def _add_products(x: Tensor, weights: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    """Add Σ weight·vector to x (B, H, n, d) in place, for weights (B, H, n) and vectors (B, H, d)."""
    columns, rows = torch.stack(weights, dim=-2).transpose(-2, -1), torch.stack(vectors, dim=-2)
    # (B, H, n, 4) @ (B, H, 4, d); a view, not flatten, which may copy
    x.view(-1, *x.shape[2:]).baddbmm_(columns.flatten(0, 1), rows.flatten(0, 1))
