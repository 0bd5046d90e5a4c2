"""Causal Flow-Attention by Triton kernels in chunks, the host's side: Flowformer (ICML 2022), Algorithm 2.

Kernels do the work on tensors with d or e channels, feature map included; flows, counts, weights and sums over chunks
are small and stay in PyTorch. q and k are read four and five times forward and five times backward, nothing of size
(n, d) is allocated but outputs and gradients, and for the backward pass only inputs, flows and sums are kept.

The kernels' file imports Triton, so it is imported where they are launched: on most machines there is none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.gpu.launch import at_least_16, ceil_div, rows, strides, tile_rows
from ..shared.state import State
from .causal import STATE_SUMS, CausalInputs, chunk_positions, empty_state
from .causal_gpu_call import Call
from .causal_weights import Positions, flow_scale, flow_weights

#: The split in chunks, when it fails.
NAME = "flow_attention"


class _Flows(NamedTuple):
    """Kept for the backward pass: flows (B, H, n), and the sums of q and k before each chunk (2, B H, G + 1, d)."""

    incoming: Tensor
    outgoing: Tensor
    conserved_incoming: Tensor
    conserved_outgoing: Tensor
    sums: Tensor
    conserved_sums: Tensor


class _Shapes:
    """The arguments that every kernel takes, and the grids of programs."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        batch, heads, n, d = q.shape
        self.size = tile_rows(q, d)
        self.columns = min(self.size, at_least_16(v.shape[3]))
        # For a program that goes through all columns, and has few registers for them.
        most = 32 if q.dtype == torch.bfloat16 else 16
        self.few_columns = min(self.columns, most, at_least_16(v.shape[3] // 2))
        self.heads, self.groups = batch * heads, ceil_div(n, self.size)
        self.grid = (self.heads * self.groups,)
        self.value_grid = (*self.grid, ceil_div(v.shape[3], self.columns))
        self.counts = (n, heads, self.groups)
        self.padding = q if call.padding is None else call.padding.contiguous().view(torch.uint8)
        self.count = call.positions.count.flatten(1)  # (B or 1, 1, 1, n) -> (B or 1, n)
        self.count_stride = n if self.count.shape[0] > 1 else 0
        self.eps, self.outer_eps = call.options.form.eps, call.options.form.outer_eps
        self.flow = {"d": d, "phi": call.options.phi, "PADDED": call.padding is not None}
        self.flow.update(C=self.size, D=at_least_16(d))
        self.value = {**self.flow, "e": v.shape[3], "E": self.columns}

    def vector_sums(self, q: Tensor, first: tuple[Tensor, Tensor]) -> Tensor:
        """Room for sums of q and of k, with ``first`` (B, H, d) each in the first slot: (2, B H, G + 1, d)."""
        sums = q.new_empty(2, self.heads, self.groups + 1, q.shape[3], dtype=torch.float32)
        sums[0, :, 0], sums[1, :, 0] = (x.flatten(0, 1) for x in first)
        return sums

    def matrix_sums(self, first: Tensor) -> Tensor:
        """Room for sums with ``first`` (B, H, d, e) in the first slot: (B H, G + 1, d, e)."""
        sums = first.new_empty(self.heads, self.groups + 1, *first.shape[2:])
        sums[:, 0] = first.flatten(0, 1)
        return sums


def start(inputs: CausalInputs) -> tuple[State, Positions]:
    """The state before the first token, and the positions of all tokens as a single chunk."""
    q, v = inputs.q, inputs.v
    state = empty_state(q, v) if inputs.state is None else inputs.state
    return state, chunk_positions(q, inputs.padding, q.shape[2], state)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, state: State) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """The output, what ``backward`` needs besides it, and the state after the tokens."""
    from . import causal_chunks_gpu_kernels as kernels

    q, k, v = rows(q), rows(k), rows(v)
    shapes = _Shapes(q, k, v, call)
    qk_strides = (*strides(q), *strides(k))
    incoming, outgoing, conserved_incoming, conserved_outgoing = q.new_empty(4, *q.shape[:3], dtype=torch.float32)

    sums = shapes.vector_sums(q, (state["sum_q"], state["sum_k"]))
    kernels.feature_sums[shapes.grid](
        q, k, shapes.padding, q, k, sums, *shapes.counts, 0.0, *qk_strides, **shapes.flow, WEIGHTED=False
    )
    sums.cumsum_(2)
    conserved_sums = shapes.vector_sums(q, (state["sum_q_over_incoming"], state["sum_k_over_outgoing"]))
    for conserved, these in ((False, sums), (True, conserved_sums)):
        kernels.flows[shapes.grid](
            q,
            k,
            shapes.padding,
            shapes.count,
            incoming,
            outgoing,
            conserved_incoming,
            conserved_outgoing,
            these,
            conserved_sums,
            *shapes.counts,
            shapes.count_stride,
            shapes.eps,
            shapes.outer_eps,
            *qk_strides,
            **shapes.flow,
            CONSERVED=conserved,
        )
        if not conserved:
            conserved_sums.cumsum_(2)

    weighted = _weights(
        incoming, conserved_incoming, conserved_outgoing, state["log_competition"], state["log_allocation"], call
    )
    competition, scale, log_competition, log_allocation = weighted
    kv_sums = _kv_sums(k, v, competition, shapes, state["sum_kv"])
    out = v.new_empty(v.shape)
    kernels.outputs[shapes.value_grid](
        q,
        k,
        v,
        shapes.padding,
        competition,
        scale,
        kv_sums,
        out,
        *shapes.counts,
        *qk_strides,
        *strides(v),
        **shapes.value,
    )
    leading = q.shape[:2]
    new_state = {
        "count": call.positions.total,
        "sum_k": sums[1, :, -1].view(*leading, -1).clone(),  # (B H, d) -> (B, H, d); a copy, as the sums are saved
        "sum_q": sums[0, :, -1].view(*leading, -1).clone(),
        "sum_k_over_outgoing": conserved_sums[1, :, -1].view(*leading, -1).clone(),
        "sum_q_over_incoming": conserved_sums[0, :, -1].view(*leading, -1).clone(),
        "log_competition": log_competition,
        "log_allocation": log_allocation,
        "sum_kv": kv_sums[:, -1].reshape(*leading, *kv_sums.shape[2:]).clone(),
    }
    flows = _Flows(incoming, outgoing, conserved_incoming, conserved_outgoing, sums, conserved_sums)
    return out, flows, new_state


def _weights(
    incoming: Tensor,
    conserved_incoming: Tensor,
    conserved_outgoing: Tensor,
    log_competition: Tensor,
    log_allocation: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Competition w and, for allocation a, a / I, from flows (B, H, n), each (B, H, n); and both logarithms after."""
    start = {"log_competition": log_competition, "log_allocation": log_allocation}
    # (B, H, n) -> (B, H, 1, n): a single chunk
    flows = conserved_incoming.unsqueeze(2), conserved_outgoing.unsqueeze(2)
    competition, allocation, logs = flow_weights(*flows, call.positions, call.options, start)
    scale = flow_scale(allocation.squeeze(2), incoming)
    return competition.squeeze(2).contiguous(), scale.contiguous(), logs["log_competition"], logs["log_allocation"]


def _kv_sums(k: Tensor, v: Tensor, competition: Tensor, shapes: _Shapes, first: Tensor) -> Tensor:
    """Σ kᵀ (w v) before each chunk, (B H, G + 1, d, e)."""
    from . import causal_chunks_gpu_kernels as kernels

    sums = shapes.matrix_sums(first)
    kernels.value_sums[shapes.value_grid](
        k,
        v,
        shapes.padding,
        v,
        competition,
        sums,
        sums,
        *shapes.counts,
        *strides(k),
        *strides(v),
        **shapes.value,
        REVERSED=False,
    )
    return sums.cumsum_(1)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    state: State,
    kept: tuple[Tensor, ...],
    out: Tensor,
    grad_out: Tensor,
    grad_state: State | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the sums of ``state``. The gradient of a running sum is a sum from the end."""
    from . import causal_chunks_gpu_kernels as kernels

    flows = _Flows(*kept)
    if grad_state is None:
        grad_state = {name: torch.zeros_like(state[name]) for name in STATE_SUMS}
    q, k, v, grad_out = rows(q), rows(k), rows(v), rows(grad_out)
    shapes, (batch, heads, n) = _Shapes(q, k, v, call), q.shape[:3]
    qk_strides, value_strides = (*strides(q), *strides(k)), (*strides(v), *strides(grad_out))
    leaves = (
        flows.incoming,
        flows.conserved_incoming,
        flows.conserved_outgoing,
        state["log_competition"],
        state["log_allocation"],
    )
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        weighted = _weights(*leaves, call)
    competition, scale = (x.detach() for x in weighted[:2])

    kv_sums = _kv_sums(k, v, competition, shapes, state["sum_kv"])
    reversed_kv_sums = shapes.matrix_sums(grad_state["sum_kv"])
    dots, grad_competition = q.new_empty(2, shapes.value_grid[1], batch, heads, n, dtype=torch.float32)
    kernels.value_sums[shapes.value_grid](
        q,
        grad_out,
        shapes.padding,
        out,
        scale,
        reversed_kv_sums,
        dots,
        *shapes.counts,
        *strides(q),
        *strides(grad_out),
        **shapes.value,
        REVERSED=True,
    )
    reversed_kv_sums.cumsum_(1)
    grad_v = v.new_empty(v.shape)
    kernels.values_backward[shapes.value_grid](
        q,
        k,
        v,
        grad_out,
        shapes.padding,
        competition,
        scale,
        reversed_kv_sums,
        grad_v,
        grad_competition,
        *shapes.counts,
        *qk_strides,
        *value_strides,
        **shapes.value,
    )

    grad_weighted = (
        grad_competition.sum(0),
        # The output is scale times something; where the scale has vanished, so has its own gradient.
        (dots.sum(0) / scale).masked_fill(scale == 0.0, 0.0),
        grad_state["log_competition"],
        grad_state["log_allocation"],
    )
    outputs, grad_outputs = zip(*((x, g) for x, g in zip(weighted, grad_weighted) if x.requires_grad))
    grads = torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True, materialize_grads=True)
    grad_direct, grad_conserved_incoming, grad_conserved_outgoing, grad_log_competition, grad_log_allocation = grads
    grad_conserved_incoming, grad_conserved_outgoing = (
        grad_conserved_incoming.contiguous(),
        grad_conserved_outgoing.contiguous(),
    )
    reversed_conserved_sums = shapes.vector_sums(
        q, (grad_state["sum_k_over_outgoing"], grad_state["sum_q_over_incoming"])
    )
    kernels.feature_sums[shapes.grid](
        q,
        k,
        shapes.padding,
        grad_conserved_incoming,
        grad_conserved_outgoing,
        reversed_conserved_sums,
        *shapes.counts,
        shapes.eps,
        *qk_strides,
        **shapes.flow,
        WEIGHTED=True,
    )
    reversed_conserved_sums.cumsum_(2)
    reversed_sums = shapes.vector_sums(q, (grad_state["sum_k"], grad_state["sum_q"]))
    grad_incoming, grad_outgoing = q.new_empty(2, batch, heads, n, dtype=torch.float32)
    kernels.flows_backward[shapes.grid](
        q,
        k,
        shapes.padding,
        shapes.count,
        flows.incoming,
        flows.outgoing,
        grad_conserved_incoming,
        grad_conserved_outgoing,
        grad_direct.contiguous(),
        reversed_conserved_sums,
        grad_incoming,
        grad_outgoing,
        reversed_sums,
        *shapes.counts,
        shapes.count_stride,
        shapes.eps,
        *qk_strides,
        **shapes.flow,
    )
    reversed_sums.cumsum_(2)

    grad_q, grad_k = q.new_empty(q.shape), k.new_empty(k.shape)
    kernels.features_backward[shapes.grid](
        q,
        k,
        v,
        grad_out,
        shapes.padding,
        shapes.count,
        flows.incoming,
        flows.outgoing,
        competition,
        scale,
        grad_incoming,
        grad_outgoing,
        grad_conserved_incoming,
        grad_conserved_outgoing,
        flows.sums,
        flows.conserved_sums,
        reversed_sums,
        reversed_conserved_sums,
        kv_sums,
        reversed_kv_sums,
        grad_q,
        grad_k,
        *shapes.counts,
        shapes.count_stride,
        shapes.eps,
        *qk_strides,
        *value_strides,
        **{**shapes.value, "E": shapes.few_columns},
    )

    def whole(sums: Tensor) -> Tensor:
        return sums[:, -1].view(batch, heads, *sums.shape[2:])  # (B H, G + 1, ...) -> (B, H, ...)

    grad_earlier = {
        "sum_k": whole(reversed_sums[0]),
        "sum_q": whole(reversed_sums[1]),
        "sum_k_over_outgoing": whole(reversed_conserved_sums[0]),
        "sum_q_over_incoming": whole(reversed_conserved_sums[1]),
        "log_competition": grad_log_competition,
        "log_allocation": grad_log_allocation,
        "sum_kv": whole(reversed_kv_sums),
    }
    return (grad_q, grad_k, grad_v, *(grad_earlier[name] for name in STATE_SUMS))
