"""The backward pass of causal Flow-Attention over some chunks, by hand. Legend: ``flow_attention``.

``grad_x`` is the gradient of the loss with respect to x; ``later_x`` that with respect to the running sum x behind each
chunk, (B, H, G, ...), which is what all later tokens ask of it. Sides as in ``flow_attention_causal_chunks``.
"""

from typing import NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import carry_sums, from_here, split_chunks
from .feature_maps import feature_map_gradient
from .flow_attention_causal_chunks import (
    CausalInput,
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
from .flow_attention_causal_weights import flow_scale, flow_weights_backward
from .flow_options import positive


class _Flows(NamedTuple):
    """Gradients of flows, each (2, B, H, G, C), and what later chunks ask of sums, each (2, B, H, G, d)."""

    plain: Tensor  # of I and O
    conserved: Tensor  # of Î and Ô
    later: Tensor  # of the features
    later_over: Tensor  # of the features times ``over``
    from_eps: Tensor  # times eps, what all flows from a token on ask of each of its features, (2, B, H, G, C)


def chunks_backward(
    given: CausalInput,
    flow: ChunkFlow,
    out: Tensor,
    grad_out: Tensor,
    grad_state: State,
    grads: Sequence[Tensor],
) -> State:
    """Fill ``grads``, of q, k (B, H, n, d) and v (B, H, n, e); the gradient of the state before them.

    ``flow`` is what ``chunks_forward`` made of ``given``, ``out`` (B, H, n, e) the output, ``grad_out`` its gradient,
    ``grad_state`` that of the state after the tokens. Features and scores are formed again; cost as there.
    """
    q, k, v, padding, options, chunk_size, state = given
    length, size = v.shape[2], min(chunk_size, v.shape[2])
    positions = chunk_positions(v, padding, size, state)
    features = chunk_features(q, k, options.phi, padding, size)
    scores, values, (q, k) = chunk_scores(features), chunk_values(v, padding, size), features.unbind()
    out, grad_out = (split_chunks(x.to(q.dtype), size) for x in (out, grad_out))  # (B, H, G, C, e)
    # Of the logarithm of what the sum of each sink is multiplied by; where that is 0, nothing depends on it.
    delta = (grad_out * out).sum(-1)
    grad_allocation = delta / flow.allocation.masked_fill(flow.allocation == 0.0, 1.0)
    grad_total = (grad_out * flow_scale(flow.allocation, flow.plain[0]).unsqueeze(-1)).contiguous()

    later_kv, grad_kv = carry_sums(q.transpose(-2, -1) @ grad_total, grad_state["sum_kv"], reverse=True)
    # Of the values times their weights; zero at padding, whose k and scores are.
    grad_weighted = k @ later_kv
    _add_product(grad_weighted, scores.to_sinks.transpose(-2, -1), grad_total)
    competition = flow.competition.unsqueeze(-1)
    torch.mul(joined(grad_weighted, length), joined(competition, length), out=grads[2])
    grad_competition = grad_weighted.mul_(values).sum(-1)
    del grad_weighted  # this and what follows, before more is made: it decides on the peak

    weights, grad_weights = (flow.competition, flow.allocation), (grad_competition, grad_allocation)
    grad_conserved, logs = flow_weights_backward(
        flow.conserved, positions, options, state, weights, grad_weights, grad_state
    )
    flows, sums = _flows_backward(flow, features, scores, options.form.eps, grad_conserved, delta, grad_state)
    del scores

    weighted = (values * competition).contiguous()
    grad_scores = _scores_backward(flow, flows, grad_total, weighted)
    grad_k = weighted @ later_kv.transpose(-2, -1)
    del later_kv
    kv = k.transpose(-2, -1) @ weighted
    del weighted
    earlier_kv = carry_sums(kv, None if state is None else state["sum_kv"])[0]
    del kv
    grad_q = grad_total @ earlier_kv.transpose(-2, -1)
    del earlier_kv, grad_total
    factors = (x.unbind() for x in _carried_backward(flow, flows, options.form.eps))
    for grad, columns, rows in zip((grad_q, grad_k), *factors):
        _add_product(grad, columns, rows)
    _add_product(grad_q, grad_scores, k)
    _add_product(grad_k, grad_scores.transpose(-2, -1), q)
    for grad, part, x in zip(grads, (grad_q, grad_k), (q, k)):
        feature_map_gradient(joined(part, length), joined(x, length), options.phi, out=grad)
    return {"sum_kv": grad_kv, **sums, **logs}


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out`` += a @ b, all (B, H, G, ..., ...)."""
    out.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


def _flows_backward(
    flow: ChunkFlow,
    features: Tensor,
    scores: Scores,
    eps: float,
    grad_conserved: Tensor,
    delta: Tensor,
    grad_state: State,
) -> Tuple[_Flows, State]:
    """From the gradients of Î and Ô (2, B, H, G, C) and log 1/I (B, H, G, C) to those of I and O, and of the sums."""
    after = side_sums(grad_state, "sum_q_over_incoming", "sum_k_over_outgoing")
    later_over, grad_sums_over = _asked(grad_conserved, features, eps, after)
    # Of c / I by way of Ô, and of c / O by way of Î.
    inside = [times_column(scores.to_sources, grad_conserved[1]), row_times(grad_conserved[0], scores.to_sinks)]
    grad_over = torch.stack(inside) + times_column(features, later_over)
    from_eps = torch.zeros_like(grad_over)
    if eps:
        from_eps = from_here(grad_conserved).flip(0)
        grad_over = grad_over + eps * flow.totals * from_eps
    # Of the logarithms of 1 / I and 1 / O.
    grad_plain = grad_over * flow.over
    grad_plain[0] += delta
    grad_plain = grad_plain / -positive(flow.plain)  # where a flow underflows, so do the features it was made of
    later, grad_sums = _asked(grad_plain, features, eps, side_sums(grad_state, "sum_q", "sum_k"))
    if eps:
        from_eps = from_here(grad_plain).flip(0) + flow.over * from_eps
    (grad_q, grad_k), (grad_q_in, grad_k_out) = grad_sums.unbind(), grad_sums_over.unbind()
    sums = {"sum_k": grad_k, "sum_q": grad_q, "sum_k_over_outgoing": grad_k_out, "sum_q_over_incoming": grad_q_in}
    return _Flows(grad_plain, grad_conserved, later, later_over, from_eps), sums


def _asked(grad: Tensor, receivers: Tensor, eps: float, after: Tensor) -> Tuple[Tensor, Tensor]:
    """What receivers (2, B, H, G, C, d) ask of the other side's sums: Σ grad (receivers + eps), plus ``after``.

    (2, B, H, G, d) of the sums behind each chunk, and (2, B, H, d) of those before the first.
    """
    asked = row_times(grad, receivers) + eps * grad.sum(-1, keepdim=True)
    return carry_sides(asked.flip(0), after, reverse=True)


def _scores_backward(flow: ChunkFlow, flows: _Flows, grad_total: Tensor, weighted: Tensor) -> Tensor:
    """Gradient of P = q kᵀ inside of each chunk, (B, H, G, C, C): of L in its lower triangle, of U in its upper one."""
    one = torch.ones_like(flow.over[0])
    grad = grad_total @ weighted.transpose(-2, -1)
    _add_product(grad, *_pairs((flows.plain[0], flows.conserved[0]), (one, flow.over[1])))
    columns, rows = _pairs((one, flow.over[0]), (flows.plain[1], flows.conserved[1]))
    lower = torch.ones(grad.shape[-2:], dtype=grad.dtype, device=grad.device).tril()
    return grad.mul_(lower).add_((columns @ rows).mul_(lower.T))


def _carried_backward(flow: ChunkFlow, flows: _Flows, eps: float) -> Tuple[Tensor, Tensor]:
    """Gradients of both features by way of all that is carried from chunk to chunk but Σ kᵀ(w v), as two factors.

    (2, B, H, G, C, 5) and (2, B, H, G, 5, d).
    """
    one = torch.ones_like(flow.over)
    received = [x.flip(0) + eps for x in (flow.carried, flow.carried_over)]
    return _pairs(
        (flows.plain, flows.conserved, one, flow.over, eps * flows.from_eps),
        (*received, flows.later, flows.later_over, torch.ones_like(flows.later)),
    )


def _pairs(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Tuple[Tensor, Tensor]:
    """Weights (..., C) and rows (..., d) as the factors (..., C, r), (..., r, d) of Σ weight · row."""
    return torch.stack(list(weights), dim=-2).transpose(-2, -1), torch.stack(list(rows), dim=-2)
