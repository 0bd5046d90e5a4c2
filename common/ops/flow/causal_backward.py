"""The hand-written backward pass of causal Flow-Attention over some chunks; ``README.md`` derives it.

``grad_sum_x_after`` is the gradient of the running sum of x after each chunk, (B, H, G, ...): the contribution of all
later tokens. Sides as in ``causal``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.chunks import carry_sums, chunk_length, reverse_cumsum, split_chunks
from ..shared.feature_maps import feature_map_gradient
from ..shared.state import State
from .causal import (
    CausalInputs,
    ChunkFlow,
    Scores,
    carry_sides,
    chunk_features,
    chunk_positions,
    chunk_scores,
    chunk_values,
    joined,
    row_times,
    side_sums,
    times_column,
)
from .causal_weights import flow_weights_backward
from .workspace import Workspace


class _FlowGradients(NamedTuple):
    """Gradients of both sides' flows (2, B, H, G, C) and of the sums after each chunk (2, B, H, G, d)."""

    flow: Tensor  # of I and O
    conserved_flow: Tensor  # of Î and Ô
    sum_after: Tensor  # of the sums of features
    sum_inverse_after: Tensor  # of the sums of features times ``inverse_flow``
    by_eps: Tensor  # of each feature through the form's eps, divided by eps (2, B, H, G, C)


def chunks_backward(
    inputs: CausalInputs,
    flow: ChunkFlow,
    out: Tensor,
    grad_out: Tensor,
    grad_state: State,
    grads: Sequence[Tensor],
    workspace: Workspace,
) -> State:
    """Write the gradients of q, k (B, H, n, d) and v (B, H, n, e) into ``grads``; return that of the state before.

    ``flow`` is a result of ``chunks_forward(inputs)``, ``out`` (B, H, n, e) the output, ``grad_out`` its gradient,
    ``grad_state`` that of the state after the tokens, empty for zeros; ``workspace`` is overwritten. Features and
    scores are recomputed; cost as in the forward pass.
    """
    q, k, v, padding, options, chunk_size, state = inputs
    length, size = v.shape[2], chunk_length(chunk_size, v.shape[2])
    positions = chunk_positions(v, padding, size, state)
    features = chunk_features(q, k, options.phi, padding, size, workspace.features)
    scores, values, (q, k) = chunk_scores(features, workspace), chunk_values(v, padding, size), features.unbind()
    out, grad_out = (split_chunks(x.to(q.dtype), size) for x in (out, grad_out))  # (B, H, G, C, e)
    # The gradient of log(allocation / I). Where an allocation is 0, nothing depends on it.
    grad_log_scale = torch.mul(grad_out, out, out=workspace.weighted).sum(-1)
    grad_allocation = grad_log_scale / flow.allocation.masked_fill(flow.allocation == 0.0, 1.0)
    scale = flow.allocation / flow.flow[0]
    grad_total = torch.mul(grad_out, scale.unsqueeze(-1), out=workspace.total)

    _product(workspace.chunk_kv, q.transpose(-2, -1), grad_total)
    grad_sum_kv_after, grad_sum_kv = carry_sums(
        workspace.chunk_kv, grad_state.get("sum_kv"), reverse=True, out=workspace.carried_kv
    )
    # The gradient of the weighted values; zero at padding, whose k and scores are zero.
    grad_weighted = _product(workspace.weighted, k, grad_sum_kv_after)
    _add_product(grad_weighted, scores.to_sinks.transpose(-2, -1), grad_total)
    competition = flow.competition.unsqueeze(-1)
    torch.mul(joined(grad_weighted, length), joined(competition, length), out=grads[2])
    grad_competition = grad_weighted.mul_(values).sum(-1)

    weights, grad_weights = (flow.competition, flow.allocation), (grad_competition, grad_allocation)
    grad_conserved, grad_logs = flow_weights_backward(
        flow.conserved_flow, positions, options, state, weights, grad_weights, grad_state
    )
    flow_grads, grad_sums = _flows_backward(
        flow, features, scores, options.form.eps, grad_conserved, grad_log_scale, grad_state
    )

    weighted = torch.mul(values, competition, out=workspace.weighted)
    grad_scores = _scores_backward(flow, flow_grads, grad_total, weighted, workspace)
    grad_k = _product(workspace.grad_k, weighted, grad_sum_kv_after.transpose(-2, -1))
    _product(workspace.chunk_kv, k.transpose(-2, -1), weighted)
    sum_kv_before, _ = carry_sums(
        workspace.chunk_kv, None if state is None else state["sum_kv"], out=workspace.carried_kv
    )
    grad_q = _product(workspace.grad_q, grad_total, sum_kv_before.transpose(-2, -1))
    factors = (x.unbind() for x in _carried_backward(flow, flow_grads, options.form.eps))
    for grad, columns, rows in zip((grad_q, grad_k), *factors):
        _add_product(grad, columns, rows)
    _add_product(grad_q, grad_scores, k)
    _add_product(grad_k, grad_scores.transpose(-2, -1), q)
    for grad, grad_features, x in zip(grads, (grad_q, grad_k), (q, k)):
        feature_map_gradient(joined(grad_features, length), joined(x, length), options.phi, out=grad)
    return {"sum_kv": grad_sum_kv, **grad_sums, **grad_logs}


def _product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``out`` = a @ b, all (B, H, G, ..., ...)."""
    torch.bmm(a.flatten(0, 2), b.flatten(0, 2), out=out.flatten(0, 2))
    return out


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out`` += a @ b, all (B, H, G, ..., ...)."""
    out.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


def _flows_backward(
    flow: ChunkFlow,
    features: Tensor,
    scores: Scores,
    eps: float,
    grad_conserved: Tensor,
    grad_log_scale: Tensor,
    grad_state: State,
) -> tuple[_FlowGradients, State]:
    """The gradients of I and O, and of the state's sums of features before the first token.

    ``grad_conserved`` (2, B, H, G, C) is the gradient of Î and Ô, ``grad_log_scale`` (B, H, G, C) that of log 1/I
    without the part through Ô.
    """
    after = side_sums(grad_state, "sum_q_over_incoming", "sum_k_over_outgoing")
    sum_inverse_after, grad_sums_inverse = _sums_backward(grad_conserved, features, eps, after)
    # The gradients of c / I through Ô, and of c / O through Î.
    inside = [times_column(scores.to_sources, grad_conserved[1]), row_times(grad_conserved[0], scores.to_sinks)]
    grad_inverse = torch.stack(inside) + times_column(features, sum_inverse_after)
    by_eps = grad_conserved  # any tensor, if it is not used
    if eps:
        by_eps = reverse_cumsum(grad_conserved).flip(0)
        grad_inverse = grad_inverse.addcmul_(flow.totals, by_eps, value=eps)
    # The gradients of the logarithms of 1 / I and 1 / O, then of I and O.
    grad_flow = grad_inverse.mul_(flow.inverse_flow)
    grad_flow[0] += grad_log_scale
    grad_flow = grad_flow.div_(flow.flow).neg_()  # where a flow underflows, so do the features it comes from
    sum_after, grad_sums = _sums_backward(grad_flow, features, eps, side_sums(grad_state, "sum_q", "sum_k"))
    if eps:
        by_eps = reverse_cumsum(grad_flow).flip(0) + flow.inverse_flow * by_eps
    (grad_q, grad_k), (grad_q_in, grad_k_out) = grad_sums.unbind(), grad_sums_inverse.unbind()
    sums = {"sum_k": grad_k, "sum_q": grad_q, "sum_k_over_outgoing": grad_k_out, "sum_q_over_incoming": grad_q_in}
    return _FlowGradients(grad_flow, grad_conserved, sum_after, sum_inverse_after, by_eps), sums


def _sums_backward(grad: Tensor, receivers: Tensor, eps: float, after: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the sums over the other side that receivers (2, B, H, G, C, d) multiply: Σ grad (receivers + eps).

    ``grad`` (2, B, H, G, C) is that of the received flows, ``after`` (2, B, H, d) that of the sums after the last
    chunk. Returns (2, B, H, G, d) for the sums after each chunk and (2, B, H, d) for those before the first.
    """
    chunk_grads = torch.add(row_times(grad, receivers), grad.sum(-1, keepdim=True), alpha=eps)
    return carry_sides(chunk_grads.flip(0), after, reverse=True)


def _scores_backward(
    flow: ChunkFlow, grads: _FlowGradients, grad_total: Tensor, weighted: Tensor, workspace: Workspace
) -> Tensor:
    """Gradient of P = q kᵀ inside of each chunk (B, H, G, C, C), of both triangles."""
    ones = torch.ones_like(flow.inverse_flow[0])
    grad = _product(workspace.to_sources, grad_total, weighted.transpose(-2, -1))
    _add_product(grad, *_pairs((grads.flow[0], grads.conserved_flow[0]), (ones, flow.inverse_flow[1])))
    columns, rows = _pairs((ones, flow.inverse_flow[0]), (grads.flow[1], grads.conserved_flow[1]))
    lower = torch.ones(grad.shape[-2:], dtype=grad.dtype, device=grad.device).tril()
    return grad.mul_(lower).add_(_product(workspace.to_sinks, columns, rows).mul_(lower.T))


def _carried_backward(flow: ChunkFlow, grads: _FlowGradients, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of both features through the sums that are carried between chunks, except Σ kᵀ(w v).

    Returned as two factors, (2, B, H, G, C, 5) and (2, B, H, G, 5, d).
    """
    one = torch.ones_like(flow.inverse_flow)
    received = [x.flip(0) + eps for x in (flow.carried, flow.carried_inverse)]
    return _pairs(
        (grads.flow, grads.conserved_flow, one, flow.inverse_flow, eps * grads.by_eps),
        (*received, grads.sum_after, grads.sum_inverse_after, torch.ones_like(grads.sum_after)),
    )


def _pairs(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights (..., C) and rows (..., d) as the factors (..., C, r), (..., r, d) of Σ weight · row."""
    return torch.stack(list(weights), dim=-2).transpose(-2, -1), torch.stack(list(rows), dim=-2)
