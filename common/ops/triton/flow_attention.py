"""Causal Flow-Attention by kernels: Flowformer (ICML 2022), Algorithm 2, in chunks. Legend: ``flow_attention``.

Kernels do what touches d or e channels, and the feature map with it; flows, counts, weights and sums over chunks are
small and stay in PyTorch. q and k are read four and five times forward and five times backward, nothing of size (n, d)
is made but outputs and gradients, and for the backward pass inputs, flows and sums are kept, not their products.
"""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..checks import State
from ..flow_attention_causal_chunks import CausalInput, attention_in_chunks, chunk_positions, state_shapes
from ..flow_attention_causal_weights import Positions, flow_scale, flow_weights
from ..flow_options import FlowOptions
from . import flow_attention_kernels as kernels
from .dispatch import guarded
from .launch import at_least_16, ceil_div, on_device_of, precision, rows, strides

NAME = "flow_attention"
# The entries of a state but its count, in the order they are passed in and out.
_SUMS = ("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming", "log_competition", "log_allocation", "sum_kv")


class _Call(NamedTuple):
    """What is no tensor with a gradient."""

    padding: Optional[Tensor]  # (B, n), True = padding
    positions: Positions  # in a single chunk
    count: Tensor  # c (B or 1, n), float32
    counted: Tensor  # tokens before these (B,)
    options: FlowOptions
    chunk_size: int  # of the PyTorch form; kernels have their own


class _Flows(NamedTuple):
    """What the forward pass keeps: flows (B, H, n), and the sums before each chunk (2, B H, G + 1, d), of q and k."""

    incoming: Tensor
    outgoing: Tensor
    conserved_incoming: Tensor
    conserved_outgoing: Tensor
    sums: Tensor
    conserved_sums: Tensor


def causal_attention(given: CausalInput) -> Tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e), in v's dtype, and the state after the tokens.

    float32, float16 or bfloat16, d up to 128, any n and e. Gradients of second order are those of the PyTorch form.
    Cost as there, with (n / C) d e numbers of temporaries.
    """
    q, k, v, padding, options, chunk_size, state = given
    earlier = _beginning(q, v) if state is None else state
    positions = chunk_positions(q, padding, q.shape[2], earlier)
    count = positions.count.flatten(1).contiguous()  # (B or 1, 1, 1, n) -> (B or 1, n)
    call = _Call(padding, positions, count, earlier["count"], options, chunk_size)
    out, *sums = _CausalFlowAttention.apply(q, k, v, call, *(earlier[name] for name in _SUMS))
    return out, {"count": positions.total, **dict(zip(_SUMS, sums))}


def _beginning(q: Tensor, v: Tensor) -> State:
    """The state before the first token."""
    like = {"dtype": torch.float32, "device": q.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(q, v).items()}
    for name in ("log_competition", "log_allocation"):
        state[name].fill_(-1e30)
    state["count"] = state["count"].long()
    return state


class _CausalFlowAttention(torch.autograd.Function):
    """q, k, v and the sums of a state -> the output and the sums of the next."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call, *earlier: Tensor) -> Tuple[Tensor, ...]:
        state = dict(zip(_SUMS, earlier))
        with on_device_of(q):
            out, flows, new_state = _forward(q, k, v, call, state)
        ctx.call = call
        ctx.save_for_backward(q, k, v, *earlier, *flows)
        return (out, *(new_state[name] for name in _SUMS))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *d_sums: Tensor) -> Tuple[Optional[Tensor], ...]:
        q, k, v, *rest = ctx.saved_tensors
        earlier, flows = rest[: len(_SUMS)], _Flows(*rest[len(_SUMS) :])
        wanted = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:])

        def by_pytorch() -> Tuple[Optional[Tensor], ...]:
            return _pytorch_gradients((q, k, v, *earlier), wanted, ctx.call, (d_out, *d_sums))

        def by_kernels() -> Tuple[Optional[Tensor], ...]:
            with on_device_of(q):
                return _backward(q, k, v, ctx.call, dict(zip(_SUMS, earlier)), flows, d_out, dict(zip(_SUMS, d_sums)))

        # With create_graph=True the gradient must have one itself, which kernels do not give.
        found = by_pytorch() if torch.is_grad_enabled() else guarded(NAME, by_kernels, by_pytorch)
        found = [gradient if want else None for gradient, want in zip(found, wanted)]
        return (*found[:3], None, *found[3:])


def _pytorch_gradients(
    inputs: Tuple[Tensor, ...], wanted: Tuple[bool, ...], call: _Call, d_outputs: Tuple[Tensor, ...]
) -> Tuple[Optional[Tensor], ...]:
    """The gradients of the PyTorch form, recomputed."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        if not again:
            inputs = tuple(x.detach().requires_grad_(want) for x, want in zip(inputs, wanted))
        state = {"count": call.counted, **dict(zip(_SUMS, inputs[3:]))}
        given = CausalInput(*inputs[:3], call.padding, call.options, call.chunk_size, state)
        out, new_state = attention_in_chunks(given)
        pairs = zip((out.to(given.v.dtype), *(new_state[name] for name in _SUMS)), d_outputs)
        outputs, d_outputs = zip(*((x, g) for x, g in pairs if x.requires_grad))
        leaves = [x for x, want in zip(inputs, wanted) if want]
        found = iter(torch.autograd.grad(outputs, leaves, d_outputs, create_graph=again, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)


class _Shapes:
    """Arguments that every kernel takes, and how programs are laid out."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> None:
        batch, heads, n, d = q.shape
        # Tiles of at most 16 KiB: several must be in a device's shared memory at once.
        self.size = 64 if d <= 64 else 32
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
        self.product = {**self.flow, "precision": precision(q)}
        self.value = {**self.product, "e": v.shape[3], "E": self.columns}

    def vector_sums(self, q: Tensor, first: Tuple[Tensor, Tensor]) -> Tensor:
        """Of q and of k, with what stands before the first slot (B, H, d) each: (2, B H, G + 1, d)."""
        sums = q.new_empty(2, self.heads, self.groups + 1, q.shape[3], dtype=torch.float32)
        sums[0, :, 0], sums[1, :, 0] = (x.flatten(0, 1) for x in first)
        return sums

    def matrix_sums(self, first: Tensor) -> Tensor:
        """With ``first`` (B, H, d, e) before the first slot: (B H, G + 1, d, e)."""
        sums = first.new_empty(self.heads, self.groups + 1, *first.shape[2:])
        sums[:, 0] = first.flatten(0, 1)
        return sums


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call, state: State) -> Tuple[Tensor, _Flows, State]:
    q, k, v = rows(q), rows(k), rows(v)
    shapes = _Shapes(q, k, v, call)
    of_qk = (*strides(q), *strides(k))
    incoming, outgoing, conserved_incoming, conserved_outgoing = q.new_empty(4, *q.shape[:3], dtype=torch.float32)

    sums = shapes.vector_sums(q, (state["sum_q"], state["sum_k"]))
    kernels.feature_sums[shapes.grid](
        q, k, shapes.padding, q, k, sums, *shapes.counts, 0.0, *of_qk, **shapes.flow, WEIGHTED=False
    )
    sums.cumsum_(2)
    conserved_sums = shapes.vector_sums(q, (state["sum_q_over_incoming"], state["sum_k_over_outgoing"]))
    for conserved, these in ((False, sums), (True, conserved_sums)):
        kernels.flows[shapes.grid](
            q, k, shapes.padding, call.count, incoming, outgoing, conserved_incoming, conserved_outgoing,
            these, conserved_sums, *shapes.counts, shapes.count_stride, shapes.eps, shapes.outer_eps, *of_qk,
            **shapes.product, CONSERVED=conserved,
        )  # fmt: skip
        if not conserved:
            conserved_sums.cumsum_(2)

    weighted = _weights(incoming, conserved_incoming, conserved_outgoing, state["log_competition"],
                        state["log_allocation"], call)  # fmt: skip
    competition, scale, log_competition, log_allocation = weighted
    kv_sums = _kv_sums(k, v, competition, shapes, state["sum_kv"])
    out = v.new_empty(v.shape)
    kernels.outputs[shapes.value_grid](
        q, k, v, shapes.padding, competition, scale, kv_sums, out, *shapes.counts, *of_qk, *strides(v), **shapes.value
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
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Competition w and, for allocation a, a / I, from flows (B, H, n), each (B, H, n); and both logarithms after."""
    start = {"log_competition": log_competition, "log_allocation": log_allocation}
    # (B, H, n) -> (B, H, 1, n): a single chunk
    flows = conserved_incoming.unsqueeze(2), conserved_outgoing.unsqueeze(2)
    competition, allocation, logs = flow_weights(*flows, call.positions, call.options, start)
    scale = flow_scale(allocation.squeeze(2), incoming)
    return competition.squeeze(2).contiguous(), scale.contiguous(), logs["log_competition"], logs["log_allocation"]


def _kv_sums(k: Tensor, v: Tensor, competition: Tensor, shapes: _Shapes, first: Tensor) -> Tensor:
    """Σ kᵀ (w v) before each chunk, (B H, G + 1, d, e)."""
    sums = shapes.matrix_sums(first)
    kernels.value_sums[shapes.value_grid](
        k, v, shapes.padding, competition, sums, *shapes.counts, *strides(k), *strides(v), **shapes.value,
        REVERSED=False,
    )  # fmt: skip
    return sums.cumsum_(1)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, state: State, flows: _Flows, d_out: Tensor, d_state: State
) -> Tuple[Tensor, ...]:
    """Gradients of q, k, v and of the sums of ``state``; of what is summed forward, sums run backward."""
    q, k, v, d_out = rows(q), rows(k), rows(v), rows(d_out)
    shapes, (batch, heads, n) = _Shapes(q, k, v, call), q.shape[:3]
    of_qk, of_values = (*strides(q), *strides(k)), (*strides(v), *strides(d_out))
    leaves = (flows.incoming, flows.conserved_incoming, flows.conserved_outgoing,
              state["log_competition"], state["log_allocation"])  # fmt: skip
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        weighted = _weights(*leaves, call)
    competition, scale = (x.detach() for x in weighted[:2])

    kv_sums = _kv_sums(k, v, competition, shapes, state["sum_kv"])
    reversed_kv_sums = shapes.matrix_sums(d_state["sum_kv"])
    kernels.value_sums[shapes.value_grid](
        q, d_out, shapes.padding, scale, reversed_kv_sums, *shapes.counts, *strides(q), *strides(d_out),
        **shapes.value, REVERSED=True,
    )  # fmt: skip
    reversed_kv_sums.cumsum_(1)
    d_v = v.new_empty(v.shape)
    d_competition, d_scale = q.new_empty(2, shapes.value_grid[1], batch, heads, n, dtype=torch.float32)
    kernels.values_backward[shapes.value_grid](
        q, k, v, d_out, shapes.padding, competition, scale, kv_sums, reversed_kv_sums, d_v, d_competition, d_scale,
        *shapes.counts, *of_qk, *of_values, **shapes.value,
    )  # fmt: skip

    d_weighted = (d_competition.sum(0), d_scale.sum(0), d_state["log_competition"], d_state["log_allocation"])
    outputs, given = zip(*((x, g) for x, g in zip(weighted, d_weighted) if x.requires_grad))
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True, materialize_grads=True)
    d_direct, d_conserved_incoming, d_conserved_outgoing, d_log_competition, d_log_allocation = found
    d_conserved_incoming, d_conserved_outgoing = d_conserved_incoming.contiguous(), d_conserved_outgoing.contiguous()
    reversed_conserved_sums = shapes.vector_sums(q, (d_state["sum_k_over_outgoing"], d_state["sum_q_over_incoming"]))
    kernels.feature_sums[shapes.grid](
        q, k, shapes.padding, d_conserved_incoming, d_conserved_outgoing, reversed_conserved_sums, *shapes.counts,
        shapes.eps, *of_qk, **shapes.flow, WEIGHTED=True,
    )  # fmt: skip
    reversed_conserved_sums.cumsum_(2)
    reversed_sums = shapes.vector_sums(q, (d_state["sum_k"], d_state["sum_q"]))
    d_incoming, d_outgoing = q.new_empty(2, batch, heads, n, dtype=torch.float32)
    kernels.flows_backward[shapes.grid](
        q, k, shapes.padding, call.count, flows.incoming, flows.outgoing, d_conserved_incoming, d_conserved_outgoing,
        d_direct.contiguous(), reversed_conserved_sums, d_incoming, d_outgoing, reversed_sums, *shapes.counts,
        shapes.count_stride, shapes.eps, *of_qk, **shapes.product,
    )  # fmt: skip
    reversed_sums.cumsum_(2)

    d_q, d_k = q.new_empty(q.shape), k.new_empty(k.shape)
    kernels.features_backward[shapes.grid](
        q, k, v, d_out, shapes.padding, call.count, flows.incoming, flows.outgoing, competition, scale,
        d_incoming, d_outgoing, d_conserved_incoming, d_conserved_outgoing,
        flows.sums, flows.conserved_sums, reversed_sums, reversed_conserved_sums, kv_sums, reversed_kv_sums, d_q, d_k,
        *shapes.counts, shapes.count_stride, shapes.eps, *of_qk, *of_values, **shapes.value,
    )  # fmt: skip

    def whole(sums: Tensor) -> Tensor:
        return sums[:, -1].view(batch, heads, *sums.shape[2:])  # (B H, G + 1, ...) -> (B, H, ...)

    d_earlier = {
        "sum_k": whole(reversed_sums[0]),
        "sum_q": whole(reversed_sums[1]),
        "sum_k_over_outgoing": whole(reversed_conserved_sums[0]),
        "sum_q_over_incoming": whole(reversed_conserved_sums[1]),
        "log_competition": d_log_competition,
        "log_allocation": d_log_allocation,
        "sum_kv": whole(reversed_kv_sums),
    }
    return (d_q, d_k, d_v, *(d_earlier[name] for name in _SUMS))
