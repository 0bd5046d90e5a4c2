"""Causal Flow-Attention by Triton kernels in chunks, the host's side: Flowformer (ICML 2022), Algorithm 2.

Kernels do the work on tensors with d or e channels, feature map included; flows, counts, weights and sums over chunks
are small and stay in PyTorch. q and k are read four and five times forward and five times backward, nothing of size
(n, d) is allocated but outputs and gradients, and for the backward pass only inputs, flows and sums are kept.

The kernels' file imports Triton, which most machines do not have, so it is imported where kernels are launched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...shared.gpu.launch import at_least_16, ceil_div, rows, strides, tile_rows
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs
from ..causal_weights import Positions, flow_scale, flow_weights


class _Flows(NamedTuple):
    """Kept for the backward pass: flows (B, H, n), and the sums of q and k before each chunk (2, B H, G + 1, d)."""

    incoming: Tensor
    outgoing: Tensor
    conserved_incoming: Tensor
    conserved_outgoing: Tensor
    sums: Tensor
    conserved_sums: Tensor


class _Weights(NamedTuple):
    """Weights of sources and sinks (B, H, n), and the state's logarithms after the tokens (B, H)."""

    competition: Tensor
    scale: Tensor  # allocation over the incoming flow
    log_competition: Tensor
    log_allocation: Tensor


class _Chunks:
    """q, k and v for the kernels, the common arguments of all kernels, and the grids of programs."""

    def __init__(self, inputs: CausalInputs, positions: Positions) -> None:
        self.q, self.k, self.v = rows(inputs.q), rows(inputs.k), rows(inputs.v)
        self.options, self.positions = inputs.options, positions
        (batch, heads, n, d), e = self.q.shape, self.v.shape[3]
        self.size = tile_rows(self.q, d)
        self.columns = min(self.size, at_least_16(e))
        # For a program that goes through all columns, and has few registers for them.
        most = 32 if self.q.dtype == torch.bfloat16 else 16
        self.few_columns = min(self.columns, most, at_least_16(e // 2))
        self.heads, self.groups = batch * heads, ceil_div(n, self.size)
        self.grid = (self.heads * self.groups,)
        self.value_grid = (*self.grid, ceil_div(e, self.columns))
        self.counts = (n, heads, self.groups)
        self.qk_strides = (*strides(self.q), *strides(self.k))
        self.padding = self.q if inputs.padding is None else inputs.padding.contiguous().view(torch.uint8)
        self.count = positions.count.flatten(1)  # (B or 1, 1, 1, n) -> (B or 1, n)
        self.count_stride = n if self.count.shape[0] > 1 else 0
        self.eps, self.outer_eps = inputs.options.form.eps, inputs.options.form.outer_eps
        self.flow = {"d": d, "phi": inputs.options.phi, "PADDED": inputs.padding is not None}
        self.flow.update(C=self.size, D=at_least_16(d))
        self.value = {**self.flow, "e": e, "E": self.columns}

    def numbers(self, *leading: int) -> Tensor:
        """Room for numbers of each token, (*leading, B, H, n)."""
        return self.q.new_empty(*leading, *self.q.shape[:3], dtype=torch.float32)

    def vector_sums(self, first_q: Tensor, first_k: Tensor) -> Tensor:
        """Room for sums of q and of k, with the first of each (B, H, d) in the first slot: (2, B H, G + 1, d)."""
        sums = self.q.new_empty(2, self.heads, self.groups + 1, self.q.shape[3], dtype=torch.float32)
        sums[0, :, 0], sums[1, :, 0] = first_q.flatten(0, 1), first_k.flatten(0, 1)
        return sums

    def matrix_sums(self, first: Tensor) -> Tensor:
        """Room for sums with ``first`` (B, H, d, e) in the first slot: (B H, G + 1, d, e)."""
        sums = first.new_empty(self.heads, self.groups + 1, *first.shape[2:])
        sums[:, 0] = first.flatten(0, 1)
        return sums

    def total(self, sums: Tensor) -> Tensor:
        """The sum over all chunks: (B H, G + 1, ...) -> (B, H, ...)."""
        return sums[:, -1].view(*self.q.shape[:2], *sums.shape[2:])


def forward(inputs: CausalInputs, positions: Positions) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """The output (B, H, n, e), the other tensors that ``backward`` needs, and the state after the tokens."""
    chunks, state = _Chunks(inputs, positions), inputs.state
    flows = _flows(chunks, state)
    conserved = flows.conserved_incoming, flows.conserved_outgoing
    weights = _weights(chunks, flows.incoming, *conserved, state["log_competition"], state["log_allocation"])
    kv_sums = _kv_sums(chunks, weights.competition, state["sum_kv"])
    out = _outputs(chunks, weights, kv_sums)
    # Copies, as the sums are saved
    sum_q, sum_k = (chunks.total(sums).clone() for sums in flows.sums)
    sum_q_over_incoming, sum_k_over_outgoing = (chunks.total(sums).clone() for sums in flows.conserved_sums)
    state_after = {
        "count": positions.total,
        "sum_k": sum_k,
        "sum_q": sum_q,
        "sum_k_over_outgoing": sum_k_over_outgoing,
        "sum_q_over_incoming": sum_q_over_incoming,
        "log_competition": weights.log_competition,
        "log_allocation": weights.log_allocation,
        "sum_kv": chunks.total(kv_sums).clone(),
    }
    return out, flows, state_after


def backward(
    inputs: CausalInputs,
    positions: Positions,
    kept: tuple[Tensor, ...],
    out: Tensor,
    grad_out: Tensor,
    grad_state: State | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the initial state's sums, in their shapes.

    The gradient of a running sum is a sum from the end.
    """
    chunks, flows, state, grad_out = _Chunks(inputs, positions), _Flows(*kept), inputs.state, rows(grad_out)
    if grad_state is None:
        grad_state = {name: torch.zeros_like(state[name]) for name in STATE_SUMS}
    leaves = (flows.incoming, flows.conserved_incoming, flows.conserved_outgoing)
    leaves = (*leaves, state["log_competition"], state["log_allocation"])
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        graph = _weights(chunks, *leaves)
    weights = _Weights(*(x.detach() for x in graph))

    kv_sums = _kv_sums(chunks, weights.competition, state["sum_kv"])
    reversed_kv_sums, grad_scale = _scales_backward(chunks, out, grad_out, weights.scale, grad_state["sum_kv"])
    grad_v, grad_competition = _values_backward(chunks, grad_out, weights, reversed_kv_sums)

    grad_weights = (grad_competition, grad_scale, grad_state["log_competition"], grad_state["log_allocation"])
    grad_direct, *grad_conserved, grad_log_competition, grad_log_allocation = _gradients(graph, leaves, grad_weights)
    grad_conserved = [grad.contiguous() for grad in grad_conserved]

    first = grad_state["sum_k_over_outgoing"], grad_state["sum_q_over_incoming"]
    reversed_conserved_sums = _feature_sums(chunks, *first, weights=grad_conserved)
    first = grad_state["sum_k"], grad_state["sum_q"]
    grad_flows, reversed_sums = _flows_backward(
        chunks, flows, grad_direct.contiguous(), grad_conserved, reversed_conserved_sums, first
    )
    grad_flows = (*grad_flows, *grad_conserved)
    sums = (flows.sums, flows.conserved_sums, reversed_sums, reversed_conserved_sums, kv_sums, reversed_kv_sums)
    grad_q, grad_k = _features_backward(chunks, flows, grad_out, weights, grad_flows, sums)
    grad_earlier = {
        "sum_k": chunks.total(reversed_sums[0]),
        "sum_q": chunks.total(reversed_sums[1]),
        "sum_k_over_outgoing": chunks.total(reversed_conserved_sums[0]),
        "sum_q_over_incoming": chunks.total(reversed_conserved_sums[1]),
        "log_competition": grad_log_competition,
        "log_allocation": grad_log_allocation,
        "sum_kv": chunks.total(reversed_kv_sums),
    }
    return (grad_q, grad_k, grad_v, *(grad_earlier[name] for name in STATE_SUMS))


def _feature_sums(chunks: _Chunks, first_q: Tensor, first_k: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
    """Σ q and Σ k before each chunk, after the first, (2, B H, G + 1, d); features are meant.

    With weights w of sinks and of sources (B, H, n): Σ w (q + ε) and Σ w (k + ε) from the end.
    """
    from . import chunks_kernels as kernels

    sums, weighted = chunks.vector_sums(first_q, first_k), weights is not None
    weights, eps = ((chunks.q, chunks.k), 0.0) if weights is None else (weights, chunks.eps)
    inputs = (chunks.q, chunks.k, chunks.padding, *weights)
    numbers = (*chunks.counts, eps, *chunks.qk_strides)
    kernels.feature_sums[chunks.grid](*inputs, sums, *numbers, **chunks.flow, WEIGHTED=weighted)
    return sums.cumsum_(2)


def _flows(chunks: _Chunks, state: State) -> _Flows:
    """All flows, and the sums that they read."""
    from . import chunks_kernels as kernels

    sums = _feature_sums(chunks, state["sum_q"], state["sum_k"])
    conserved_sums = chunks.vector_sums(state["sum_q_over_incoming"], state["sum_k_over_outgoing"])
    flows = _Flows(*chunks.numbers(4), sums, conserved_sums)
    numbers = (*chunks.counts, chunks.count_stride, chunks.eps, chunks.outer_eps, *chunks.qk_strides)
    for conserved in (False, True):
        inputs = (chunks.q, chunks.k, chunks.padding, chunks.count)
        outputs = (*flows[:4], conserved_sums if conserved else sums, conserved_sums)
        kernels.flows[chunks.grid](*inputs, *outputs, *numbers, **chunks.flow, CONSERVED=conserved)
        if not conserved:
            conserved_sums.cumsum_(2)
    return flows


def _weights(
    chunks: _Chunks,
    incoming: Tensor,
    conserved_incoming: Tensor,
    conserved_outgoing: Tensor,
    log_competition: Tensor,
    log_allocation: Tensor,
) -> _Weights:
    """The weights of all tokens from flows (B, H, n) and the logarithms before the tokens."""
    logs = {"log_competition": log_competition, "log_allocation": log_allocation}
    # (B, H, n) -> (B, H, 1, n): a single chunk
    conserved = conserved_incoming.unsqueeze(2), conserved_outgoing.unsqueeze(2)
    competition, allocation, logs = flow_weights(*conserved, chunks.positions, chunks.options, logs)
    scale = flow_scale(allocation.squeeze(2), incoming)
    return _Weights(competition.squeeze(2).contiguous(), scale.contiguous(), **logs)


def _kv_sums(chunks: _Chunks, competition: Tensor, first: Tensor) -> Tensor:
    """Σ kᵀ (w v) before each chunk, (B H, G + 1, d, e)."""
    from . import chunks_kernels as kernels

    sums = chunks.matrix_sums(first)
    inputs = (chunks.k, chunks.v, chunks.padding, chunks.v, competition)
    numbers = (*chunks.counts, *strides(chunks.k), *strides(chunks.v))
    kernels.value_sums[chunks.value_grid](*inputs, sums, sums, *numbers, **chunks.value, REVERSED=False)
    return sums.cumsum_(1)


def _outputs(chunks: _Chunks, weights: _Weights, kv_sums: Tensor) -> Tensor:
    """The output (B, H, n, e), in v's dtype."""
    from . import chunks_kernels as kernels

    out = chunks.v.new_empty(chunks.v.shape)
    inputs = (chunks.q, chunks.k, chunks.v, chunks.padding, weights.competition, weights.scale, kv_sums)
    numbers = (*chunks.counts, *chunks.qk_strides, *strides(chunks.v))
    kernels.outputs[chunks.value_grid](*inputs, out, *numbers, **chunks.value)
    return out


def _scales_backward(
    chunks: _Chunks, out: Tensor, grad_out: Tensor, scale: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ qᵀ (s ∂out) after each chunk (B H, G + 1, d, e), from the end; and the gradient of the scale s (B, H, n)."""
    from . import chunks_kernels as kernels

    sums, dots = chunks.matrix_sums(first), chunks.numbers(chunks.value_grid[1])
    inputs = (chunks.q, grad_out, chunks.padding, out, scale)
    numbers = (*chunks.counts, *strides(chunks.q), *strides(grad_out))
    kernels.value_sums[chunks.value_grid](*inputs, sums, dots, *numbers, **chunks.value, REVERSED=True)
    # The output is a multiple of scale; where the scale is 0, so is its gradient.
    return sums.cumsum_(1), (dots.sum(0) / scale).masked_fill(scale == 0.0, 0.0)


def _values_backward(
    chunks: _Chunks, grad_out: Tensor, weights: _Weights, reversed_kv_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of v (B, H, n, e) and of competition (B, H, n)."""
    from . import chunks_kernels as kernels

    grad_v, grad_competition = chunks.v.new_empty(chunks.v.shape), chunks.numbers(chunks.value_grid[1])
    inputs = (chunks.q, chunks.k, chunks.v, grad_out, chunks.padding, *weights[:2], reversed_kv_sums)
    numbers = (*chunks.counts, *chunks.qk_strides, *strides(chunks.v), *strides(grad_out))
    kernels.values_backward[chunks.value_grid](*inputs, grad_v, grad_competition, *numbers, **chunks.value)
    return grad_v, grad_competition.sum(0)


def _gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of ``leaves``, zero if outputs do not depend on them; some outputs may not depend on any leaf."""
    outputs, grad_outputs = zip(*((x, grad) for x, grad in zip(outputs, grad_outputs) if x.requires_grad))
    return torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True, materialize_grads=True)


def _flows_backward(
    chunks: _Chunks,
    flows: _Flows,
    grad_direct: Tensor,
    grad_conserved: Sequence[Tensor],
    reversed_conserved_sums: Tensor,
    first: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of I and O (2, B, H, n), and sums that are weighted with them, from the end (2, B H, G + 1, d).

    ``grad_direct`` is the gradient of I that does not pass through Ô, ``grad_conserved`` are those of Î and Ô.
    """
    from . import chunks_kernels as kernels

    reversed_sums, grads = chunks.vector_sums(*first), chunks.numbers(2)
    inputs = (chunks.q, chunks.k, chunks.padding, chunks.count, *flows[:2], *grad_conserved, grad_direct)
    numbers = (*chunks.counts, chunks.count_stride, chunks.eps, *chunks.qk_strides)
    kernels.flows_backward[chunks.grid](
        *inputs, reversed_conserved_sums, *grads, reversed_sums, *numbers, **chunks.flow
    )
    return grads, reversed_sums.cumsum_(2)


def _features_backward(
    chunks: _Chunks,
    flows: _Flows,
    grad_out: Tensor,
    weights: _Weights,
    grad_flows: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k, from those of I, O, Î and Ô and of the output; ``sums`` in the order of the kernel."""
    from . import chunks_kernels as kernels

    grad_q, grad_k = chunks.q.new_empty(chunks.q.shape), chunks.k.new_empty(chunks.k.shape)
    inputs = (chunks.q, chunks.k, chunks.v, grad_out, chunks.padding, chunks.count, *flows[:2], *weights[:2])
    numbers = (*chunks.counts, chunks.count_stride, chunks.eps, *chunks.qk_strides)
    numbers = (*numbers, *strides(chunks.v), *strides(grad_out))
    sizes = {**chunks.value, "E": chunks.few_columns}
    kernels.features_backward[chunks.grid](*inputs, *grad_flows, *sums, grad_q, grad_k, *numbers, **sizes)
    return grad_q, grad_k
