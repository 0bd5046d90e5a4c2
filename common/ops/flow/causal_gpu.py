"""Causal Flow-Attention by Triton kernels, the host's side: Flowformer (ICML 2022), Algorithm 2, in chunks.

Kernels do the work on tensors with d or e channels, feature map included; flows, counts, weights and sums over chunks
are small and stay in PyTorch. q and k are read four and five times forward and five times backward, nothing of size
(n, d) is allocated but outputs and gradients, and for the backward pass only inputs, flows and sums are kept.

The kernels' file imports Triton, so it is imported where they are launched: on most machines there is none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.gpu import dispatch
from ..shared.gpu.first_use import FirstUse, sample_like, sample_padding
from ..shared.gpu.launch import at_least_16, ceil_div, on_device_of, rows, strides, tile_rows
from ..shared.state import State
from .causal import STATE_SUMS, CausalInputs, attention_in_chunks, chunk_positions, state_shapes
from .causal_weights import Positions, flow_scale, flow_weights
from .options import FlowOptions, excluded_logit

NAME = "flow_attention"


def applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal Flow-Attention of q, k (B, H, n, d) and v (B, H, n, e) goes through kernels: d up to 128."""
    return dispatch.applies(NAME, q, k, v) and q.shape[3] <= dispatch.MAX_CHANNELS


class _Call(NamedTuple):
    """The arguments that have no gradient."""

    padding: Tensor | None  # (B, n), True = padding
    positions: Positions  # in a single chunk
    count: Tensor  # c (B or 1, n), float32
    counted: Tensor  # tokens before these (B,)
    options: FlowOptions
    chunk_size: int  # of plain PyTorch; kernels have their own


class _Flows(NamedTuple):
    """Kept for the backward pass: flows (B, H, n), and the sums of q and k before each chunk (2, B H, G + 1, d)."""

    incoming: Tensor
    outgoing: Tensor
    conserved_incoming: Tensor
    conserved_outgoing: Tensor
    sums: Tensor
    conserved_sums: Tensor


def causal_attention(inputs: CausalInputs) -> tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e), in v's dtype, and the state after the tokens.

    float32, float16 or bfloat16, d up to 128, any n and e. Gradients of gradients come from plain PyTorch.
    Cost as there, with (n / C) d e numbers of temporaries.
    """
    q, k, v, padding, options, chunk_size, state = inputs
    earlier = empty_state(q, v) if state is None else state
    positions = chunk_positions(q, padding, q.shape[2], earlier)
    count = positions.count.flatten(1).contiguous()  # (B or 1, 1, 1, n) -> (B or 1, n)
    call = _Call(padding, positions, count, earlier["count"], options, chunk_size)
    out, *sums = _CausalFlowAttention.apply(q, k, v, call, *(earlier[name] for name in STATE_SUMS))
    return out, {"count": positions.total, **dict(zip(STATE_SUMS, sums))}


def first_use(inputs: CausalInputs) -> FirstUse:
    """What is compared before kernels take such inputs for the first time: three tiles of tokens."""
    q, v, options, padded = inputs.q, inputs.v, inputs.options, inputs.padding is not None
    tokens = 2 * tile_rows(q, q.shape[3]) + 7

    def sample() -> list[Tensor]:
        return [sample_like(x, tokens, seed) for seed, x in enumerate((q, inputs.k, v))]

    def by(attend: Callable[[CausalInputs], tuple[Tensor, State]]) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            padding = sample_padding(tokens, q.device) if padded else None
            return attend(CausalInputs(q, k, v, padding, options, inputs.chunk_size, None))[0]

        return run

    case = (q.dtype, q.shape[3], v.shape[3], options, padded)
    return FirstUse(NAME, q.device, case, sample, by(causal_attention), by(attention_in_chunks))


def empty_state(q: Tensor, v: Tensor) -> State:
    """The state before the first token."""
    like = {"dtype": torch.float32, "device": q.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(q, v).items()}
    for name in ("log_competition", "log_allocation"):
        state[name].fill_(excluded_logit())
    state["count"] = state["count"].long()
    return state


class _CausalFlowAttention(torch.autograd.Function):
    """q, k, v and the sums of a state -> the output and the sums of the next."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call, *earlier: Tensor) -> tuple[Tensor, ...]:
        state = dict(zip(STATE_SUMS, earlier))
        with on_device_of(q):
            out, flows, new_state = _forward(q, k, v, call, state)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, *earlier, *flows)
        return (out, *(new_state[name] for name in STATE_SUMS))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *rest = ctx.saved_tensors
        earlier, flows = rest[: len(STATE_SUMS)], _Flows(*rest[len(STATE_SUMS) :])
        needed = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:])

        def by_pytorch() -> list[Tensor | None]:
            return _graph_gradients((q, k, v, *earlier), ctx.call, (grad_out, *grad_sums))

        def by_kernels() -> tuple[Tensor | None, ...]:
            with on_device_of(q):
                state, grad_state = (dict(zip(STATE_SUMS, x)) for x in (earlier, grad_sums))
                return _backward(q, k, v, ctx.call, state, flows, out, grad_out, grad_state)

        # With create_graph=True gradients must have gradients themselves, which those of kernels have not.
        grads = by_pytorch() if torch.is_grad_enabled() else dispatch.guarded(NAME, by_kernels, by_pytorch)
        grads = [grad if need else None for grad, need in zip(grads, needed)]
        return (*grads[:3], None, *grads[3:])


def _graph_gradients(inputs: tuple[Tensor, ...], call: _Call, grad_outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradients of q, k, v and the sums by plain PyTorch, computed once more."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        state = {"count": call.counted, **dict(zip(STATE_SUMS, sums))}
        out, new_state = attention_in_chunks(CausalInputs(q, k, v, call.padding, call.options, call.chunk_size, state))
        return (out.to(v.dtype), *(new_state[name] for name in STATE_SUMS))

    return graph_gradients(attend, inputs, grad_outputs)


class _Shapes:
    """The arguments that every kernel takes, and the grids of programs."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> None:
        batch, heads, n, d = q.shape
        self.size = tile_rows(q, d)
        self.columns = min(self.size, at_least_16(v.shape[3]))
        self.heads, self.groups = batch * heads, ceil_div(n, self.size)
        self.grid = (self.heads * self.groups,)
        self.value_grid = (*self.grid, ceil_div(v.shape[3], self.columns))
        self.counts = (n, heads, self.groups)
        self.padding = q if call.padding is None else call.padding.contiguous().view(torch.uint8)
        self.count_stride = n if call.count.shape[0] > 1 else 0
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


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call, state: State) -> tuple[Tensor, _Flows, State]:
    from . import causal_gpu_kernels as kernels

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
            call.count,
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
    call: _Call,
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
    from . import causal_gpu_kernels as kernels

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


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: _Call,
    state: State,
    flows: _Flows,
    out: Tensor,
    grad_out: Tensor,
    grad_state: State,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the sums of ``state``. The gradient of a running sum is a sum from the end."""
    from . import causal_gpu_kernels as kernels

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
        call.count,
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
        call.count,
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
        **{
            **shapes.value,
            "E": min(64 // q.element_size(), shapes.columns),
        },  # few registers, as a program goes through all columns
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
