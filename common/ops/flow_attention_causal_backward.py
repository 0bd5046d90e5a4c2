"""The backward pass of causal Flow-Attention over some chunks, by hand. Legend: ``flow_attention``.

``grad_x`` is the gradient of the loss with respect to x; ``later_x`` that with respect to the running sum x behind each
chunk, (B, H, G, ...), which is what all later tokens ask of it.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import carry_sums, split_chunks
from .flow_attention_causal_chunks import (
    ChunkFlow,
    Positions,
    causal_flow,
    chunk_features,
    chunk_positions,
    chunk_values,
    flow_scale,
    flow_weights,
    joined,
    reciprocals,
    row_times,
    times_column,
)
from .flow_options import FlowOptions


class _Flows(NamedTuple):
    """Gradients with respect to I, O, Î and Ô, each (B, H, G, C)."""

    incoming: Tensor
    outgoing: Tensor
    conserved_incoming: Tensor
    conserved_outgoing: Tensor


class _Later(NamedTuple):
    """What later chunks ask of the sums behind each chunk, (B, H, G, d)."""

    k: Tensor
    q: Tensor
    k_over_outgoing: Tensor
    q_over_incoming: Tensor


def chunks_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    size: int,
    state: Optional[State],
    out: Tensor,
    grad_out: Tensor,
    grad_state: State,
) -> Tuple[Tuple[Tensor, Tensor, Tensor], State]:
    """Gradients of q, k (B, H, n, d) and v (B, H, n, e), and of the state before them, from that of the one behind.

    Arguments and cost as of ``attention_in_chunks``, whose flows this forms again and whose output is ``out``.
    """
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k)]
        features = [chunk_features(x, options.phi, padding, size) for x in inputs]
    q, k = (x.detach() for x in features)
    out, grad_out = (split_chunks(x.to(q.dtype), size) for x in (out, grad_out))  # (B, H, G, C, e)
    values, positions = chunk_values(v, padding, size), chunk_positions(v, padding, size, state)
    flow, _ = causal_flow(q, k, positions, options, state)
    competition, scale = flow.competition.unsqueeze(-1), flow_scale(flow.allocation, flow.incoming)
    weighted, grad_total = values * competition, grad_out * scale.unsqueeze(-1)
    earlier_kv, _ = carry_sums(k.transpose(-2, -1) @ weighted, None if state is None else state["sum_kv"])
    later_kv, grad_kv = carry_sums(q.transpose(-2, -1) @ grad_total, grad_state["sum_kv"], reverse=True)
    grad_weighted = k @ later_kv
    _add_product(grad_weighted, flow.to_sinks.transpose(-2, -1), grad_total)
    grad_v = joined(grad_weighted * competition, v.shape[2])  # zero at padding, whose k and scores are
    grad_competition = grad_weighted.mul_(values).sum(-1)
    # What is scaled is the output over its scale; where that is 0, nothing depends on it.
    grad_scale = (grad_out * out).sum(-1) / scale.masked_fill(scale == 0.0, 1.0)
    flows, later, before = _flows_backward(flow, positions, options, state, grad_competition, grad_scale, grad_state)
    grad_scores = _scores_backward(flow, flows, grad_total, weighted)
    grad_q, grad_k = _features_backward(flow, flows, later, options.form.eps)
    _add_product(grad_q, grad_scores, k)
    _add_product(grad_q, grad_total, earlier_kv.transpose(-2, -1))
    _add_product(grad_k, grad_scores.transpose(-2, -1), q)
    _add_product(grad_k, weighted, later_kv.transpose(-2, -1))
    grads = torch.autograd.grad(features, inputs, [grad_q, grad_k])
    return (*grads, grad_v), {"sum_kv": grad_kv, **before}


def pulled_back(
    outputs: Sequence[Tensor], inputs: Sequence[Optional[Tensor]], grads: Sequence[Tensor], create_graph: bool = False
) -> List[Optional[Tensor]]:
    """``torch.autograd.grad`` that lets outputs and inputs stand out of the graph; the gradient is None for those."""
    results = [(x, grad) for x, grad in zip(outputs, grads) if x.requires_grad]
    sources = [x for x in inputs if x is not None and x.requires_grad]
    if not results or not sources:
        return [None] * len(inputs)
    outputs, grads = zip(*results)
    found = iter(torch.autograd.grad(outputs, sources, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def _from_here(x: Tensor) -> Tensor:
    """Sums over the tokens of a chunk from each one on, (..., C) -> (..., C)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out`` += a @ b, all (B, H, G, ..., ...)."""
    out.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


def _flows_backward(
    flow: ChunkFlow,
    positions: Positions,
    options: FlowOptions,
    state: Optional[State],
    grad_competition: Tensor,
    grad_scale: Tensor,
    grad_state: State,
) -> Tuple[_Flows, _Later, State]:
    """From the gradients of what the output is made of to those of the flows, and of the sums they carry."""
    eps = options.form.eps
    grad_i, grad_i_hat, grad_o_hat, logs = _weights_backward(
        flow, positions, options, state, grad_competition, grad_scale, grad_state
    )
    later_q_in, grad_q_in = _asked(grad_o_hat, flow.k, eps, grad_state["sum_q_over_incoming"])
    later_k_out, grad_k_out = _asked(grad_i_hat, flow.q, eps, grad_state["sum_k_over_outgoing"])
    # Of c / I by way of Ô, and of c / O by way of Î.
    grad_over_i = times_column(flow.to_sources, grad_o_hat) + times_column(flow.q, later_q_in)
    grad_over_o = row_times(grad_i_hat, flow.to_sinks) + times_column(flow.k, later_k_out)
    if eps:
        grad_over_i = grad_over_i + eps * flow.q_total * _from_here(grad_o_hat)
        grad_over_o = grad_over_o + eps * flow.k_total * _from_here(grad_i_hat)
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (flow.incoming, flow.outgoing)]
        over = reciprocals(*given, positions)
    more_i, grad_o = torch.autograd.grad(over, given, [grad_over_i, grad_over_o])
    grad_i = grad_i + more_i
    later_k, grad_k = _asked(grad_i, flow.q, eps, grad_state["sum_k"])
    later_q, grad_q = _asked(grad_o, flow.k, eps, grad_state["sum_q"])
    sums = {"sum_k": grad_k, "sum_q": grad_q, "sum_k_over_outgoing": grad_k_out, "sum_q_over_incoming": grad_q_in}
    later = _Later(later_k, later_q, later_k_out, later_q_in)
    return _Flows(grad_i, grad_o, grad_i_hat, grad_o_hat), later, {**sums, **logs}


def _asked(grad: Tensor, receivers: Tensor, eps: float, after: Tensor) -> Tuple[Tensor, Tensor]:
    """What receivers (B, H, G, C, d) ask of the sum their flow comes from: Σ grad (receivers + eps), plus ``after``.

    (B, H, G, d) of the sum behind each chunk, and (B, H, d) of that before the first.
    """
    return carry_sums(row_times(grad, receivers) + eps * grad.sum(-1, keepdim=True), after, reverse=True)


def _weights_backward(
    flow: ChunkFlow,
    positions: Positions,
    options: FlowOptions,
    state: Optional[State],
    grad_competition: Tensor,
    grad_scale: Tensor,
    grad_state: State,
) -> Tuple[Tensor, Tensor, Tensor, State]:
    """Gradients of I, as far as the output is divided by it, Î, Ô and the sums of the softmaxes."""
    names = ("log_competition", "log_allocation")
    with torch.enable_grad():
        flows = [x.detach().requires_grad_() for x in (flow.incoming, flow.conserved_incoming, flow.conserved_outgoing)]
        start = {} if state is None else {name: state[name].detach().requires_grad_() for name in names}
        competition, allocation, logs = flow_weights(*flows[1:], positions, options, start)
        outputs = [competition, flow_scale(allocation, flows[0]), *(logs[name] for name in names)]
    given = [*flows, *(start.get(name) for name in names)]
    grads = pulled_back(outputs, given, [grad_competition, grad_scale, *(grad_state[name] for name in names)])
    of_flows = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, flows))
    of_logs = (torch.zeros_like(grad_state[x]) if grad is None else grad for grad, x in zip(grads[3:], names))
    return (*of_flows, dict(zip(names, of_logs)))


def _scores_backward(flow: ChunkFlow, flows: _Flows, grad_total: Tensor, weighted: Tensor) -> Tensor:
    """Gradient of P = q kᵀ inside of each chunk, (B, H, G, C, C): of L in its lower triangle, of U in its upper one."""
    one = torch.ones_like(flows.incoming)
    grad = grad_total @ weighted.transpose(-2, -1)
    columns = torch.stack([flows.incoming, flows.conserved_incoming], dim=-1)  # (B, H, G, C, 2)
    _add_product(grad, columns, torch.stack([one, flow.over_outgoing], dim=-2))
    lower = torch.ones(grad.shape[-2:], dtype=grad.dtype, device=grad.device).tril()
    columns = torch.stack([one, flow.over_incoming], dim=-1)  # (B, H, G, C, 2)
    upper = columns @ torch.stack([flows.outgoing, flows.conserved_outgoing], dim=-2)
    return grad.mul_(lower).addcmul_(upper, lower.T)


def _features_backward(flow: ChunkFlow, flows: _Flows, later: _Later, eps: float) -> Tuple[Tensor, Tensor]:
    """Gradients of q and k (B, H, G, C, d) by way of all that is carried from chunk to chunk but Σ kᵀ(w v)."""
    carried, one = flow.carried, torch.ones_like(flows.incoming)
    in_q = _from_here(flows.outgoing) + flow.over_incoming * _from_here(flows.conserved_outgoing)
    in_k = _from_here(flows.incoming) + flow.over_outgoing * _from_here(flows.conserved_incoming)
    grad_q = _combined(
        (flows.incoming, flows.conserved_incoming, one, flow.over_incoming, eps * in_q),
        (carried.k + eps, carried.k_over_outgoing + eps, later.q, later.q_over_incoming, torch.ones_like(later.q)),
    )
    grad_k = _combined(
        (flows.outgoing, flows.conserved_outgoing, one, flow.over_outgoing, eps * in_k),
        (carried.q + eps, carried.q_over_incoming + eps, later.k, later.k_over_outgoing, torch.ones_like(later.k)),
    )
    return grad_q, grad_k


def _combined(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Σ weight · row of weights (B, H, G, C) and rows (B, H, G, d): (B, H, G, C, d)."""
    return torch.stack(list(weights), dim=-1) @ torch.stack(list(rows), dim=-2)
