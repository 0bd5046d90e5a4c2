"""Causal Flow-Attention by Triton kernels in chunks, the host's side: Flowformer (ICML 2022), Algorithm 2.

Kernels do all the work but the counts of tokens. q and k are read four
and five times forward and five times backward, nothing of size (n, d) is allocated but outputs and gradients, and for
the backward pass only inputs, flows, weights and sums are kept.

The kernels' file imports Triton, which most machines do not have, so it is imported where kernels are launched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...shared.gpu.launch import at_least_16, ceil_div, rows, strides, tile_rows
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs
from ..causal_weights import Positions
from ..options import excluded_logit

#: The logarithms of a state, in the order of the kernels.
_LOGS = ("log_competition", "log_allocation")
#: Tokens that a program of the weights takes at once, at most; it walks through all tokens of a head.
SCAN = 1024


class _Flows(NamedTuple):
    """Kept for the backward pass: flows (B, H, n), and the sums of q and k before each chunk (2, B H, G + 1, d)."""

    incoming: Tensor
    outgoing: Tensor
    conserved_outgoing: Tensor
    sums: Tensor
    conserved_sums: Tensor


class _Weights(NamedTuple):
    """Kept for the backward pass: weights of sources and sinks (B, H, n)."""

    competition: Tensor
    scale: Tensor  # allocation over the incoming flow
    allocation: Tensor


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
        options = inputs.options
        self.weights = {"COMPETITION": options.competition, "ALLOCATION": options.allocation}
        self.weights.update(PADDED=inputs.padding is not None, T=min(SCAN, at_least_16(n)))

    def numbers(self, *leading: int) -> Tensor:
        """Room for numbers of each token, (*leading, B, H, n)."""
        return self.q.new_empty(*leading, *self.q.shape[:3], dtype=torch.float32)

    def vector_sums(self) -> Tensor:
        """Room for sums of q and of k, (2, B H, G + 1, d)."""
        return self.q.new_empty(2, self.heads, self.groups + 1, self.q.shape[3], dtype=torch.float32)

    def matrix_sums(self, kinds: int) -> Tensor:
        """Room for sums of kᵀv and the like, (``kinds``, B H, G + 1, d, e)."""
        shape = kinds, self.heads, self.groups + 1, self.q.shape[3], self.v.shape[3]
        return self.q.new_empty(shape, dtype=torch.float32)

    def so_far(self, sums: Tensor, *first: Tensor | None) -> list[Tensor]:
        """Turn ``sums`` of chunks, in slots 1 to G, into those of all chunks up to each, in place; returns the last.

        Those of each kind start with one of ``first``, one or two of (B, H, ...) or None for 0, and have a last one.
        """
        from . import chunks_kernels as kernels

        shape, started = sums.shape[3:], any(x is not None for x in first)
        last = [sums.new_empty(*self.q.shape[:2], *shape) for _ in first]
        given = [torch.zeros_like(last[0]) if x is None else x.contiguous() for x in first] if started else last
        block = min(128, at_least_16(shape.numel()))
        grid = len(first) * self.heads, ceil_div(shape.numel(), block)
        pointers = sums, given[0], given[-1], last[0], last[-1]
        numbers = self.groups, self.heads, shape.numel()
        kernels.sums_so_far[grid](*pointers, *numbers, STARTED=started, R=8, W=block)
        return last

    def logs(self, state: State) -> tuple[list[Tensor], bool]:
        """The logarithms of the competition and the allocation in ``state`` (B, H), room for others, and if there are.

        In the order of the kernels: two before, which are not read if there are none, and two after.
        """
        last = [self.q.new_empty(self.q.shape[:2], dtype=torch.float32) for _ in range(2)]
        first = [state[name].contiguous() for name in _LOGS] if state else last
        return [*first, *last], bool(state)


def forward(inputs: CausalInputs, positions: Positions) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """The output (B, H, n, e), the other tensors that ``backward`` needs, and the state after the tokens."""
    chunks, state = _Chunks(inputs, positions), inputs.state or {}
    flows, conserved_incoming, last = _flows(chunks, state)
    weights, logs = _weights(chunks, flows, conserved_incoming, state)
    kv_sums = chunks.matrix_sums(1)
    _add_values(chunks, weights.competition, kv_sums[0])
    (sum_kv,) = chunks.so_far(kv_sums, state.get("sum_kv"))
    out = _outputs(chunks, weights, kv_sums[0])
    state_after = {"count": positions.total, **last, **logs, "sum_kv": sum_kv}
    return out, (*flows, *weights), state_after


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
    chunks, grad_state, grad_out = _Chunks(inputs, positions), grad_state or {}, rows(grad_out)
    flows, weights = _Flows(*kept[: len(_Flows._fields)]), _Weights(*kept[len(_Flows._fields) :])

    first_kv = None if inputs.state is None else inputs.state["sum_kv"]
    kv_sums, reversed_kv_sums = both = chunks.matrix_sums(2)
    _add_values(chunks, weights.competition, kv_sums)
    dots = _add_output_gradients(chunks, out, grad_out, weights.scale, reversed_kv_sums)
    _, grad_kv = chunks.so_far(both, first_kv, grad_state.get("sum_kv"))
    grad_v, grad_competition = _values_backward(chunks, grad_out, weights, reversed_kv_sums)
    grads, grad_logs = _weights_backward(chunks, flows, weights, grad_competition, dots, grad_state)
    grad_direct, *grad_conserved = grads

    first = grad_state.get("sum_k_over_outgoing"), grad_state.get("sum_q_over_incoming")
    reversed_conserved_sums, grad_last = _feature_sums(chunks, *first, weights=grad_conserved)
    first = grad_state.get("sum_k"), grad_state.get("sum_q")
    grad_flows, reversed_sums, grad_first = _flows_backward(
        chunks, flows, grad_direct, grad_conserved, reversed_conserved_sums, first
    )
    grad_flows = (*grad_flows, *grad_conserved)
    sums = (flows.sums, flows.conserved_sums, reversed_sums, reversed_conserved_sums, kv_sums, reversed_kv_sums)
    grad_q, grad_k = _features_backward(chunks, flows, grad_out, weights, grad_flows, sums)
    # What q read are sums of k, and the other way round.
    names = "sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming"
    grad_earlier = {**dict(zip(names, (*grad_first, *grad_last))), **grad_logs, "sum_kv": grad_kv}
    return (grad_q, grad_k, grad_v, *(grad_earlier[name] for name in STATE_SUMS))


def _feature_sums(
    chunks: _Chunks, first_q: Tensor | None, first_k: Tensor | None, weights: Sequence[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Σ q and Σ k before each chunk, after the first, (2, B H, G + 1, d), and the last; features are meant.

    With weights w of sinks and of sources (B, H, n): Σ w (q + ε) and Σ w (k + ε) from the end.
    """
    from . import chunks_kernels as kernels

    sums, weighted = chunks.vector_sums(), weights is not None
    weights, eps = ((chunks.q, chunks.k), 0.0) if weights is None else (weights, chunks.eps)
    inputs = (chunks.q, chunks.k, chunks.padding, *weights)
    numbers = (*chunks.counts, eps, *chunks.qk_strides)
    kernels.feature_sums[chunks.grid](*inputs, sums, *numbers, **chunks.flow, WEIGHTED=weighted)
    return sums, chunks.so_far(sums, first_q, first_k)


def _flows(chunks: _Chunks, state: State) -> tuple[_Flows, Tensor, State]:
    """I, O and Ô with the sums that they read; Î (B, H, n), which the backward pass does not need; the last sums."""
    from . import chunks_kernels as kernels

    sums, (sum_q, sum_k) = _feature_sums(chunks, state.get("sum_q"), state.get("sum_k"))
    conserved_sums, last = chunks.vector_sums(), {"sum_q": sum_q, "sum_k": sum_k}
    incoming, outgoing, conserved_incoming, conserved_outgoing = (chunks.numbers() for _ in range(4))
    numbers = (*chunks.counts, chunks.count_stride, chunks.eps, chunks.outer_eps, *chunks.qk_strides)
    for conserved in (False, True):
        inputs = (chunks.q, chunks.k, chunks.padding, chunks.count)
        outputs = (incoming, outgoing, conserved_incoming, conserved_outgoing)
        outputs = (*outputs, conserved_sums if conserved else sums, conserved_sums)
        kernels.flows[chunks.grid](*inputs, *outputs, *numbers, **chunks.flow, CONSERVED=conserved)
        if not conserved:
            names = "sum_q_over_incoming", "sum_k_over_outgoing"
            last |= zip(names, chunks.so_far(conserved_sums, *(state.get(name) for name in names)))
    return _Flows(incoming, outgoing, conserved_outgoing, sums, conserved_sums), conserved_incoming, last


def _weights(chunks: _Chunks, flows: _Flows, conserved_incoming: Tensor, state: State) -> tuple[_Weights, State]:
    """The weights of all tokens, and the logarithms after them (B, H)."""
    from . import chunks_kernels as kernels

    weights, (logs, started) = _Weights(*chunks.numbers(3)), chunks.logs(state)
    inputs = (flows.incoming, conserved_incoming, flows.conserved_outgoing, chunks.padding, chunks.count)
    numbers = (chunks.counts[0], chunks.counts[1], chunks.count_stride, chunks.options.clamp, excluded_logit())
    kernels.weights[(chunks.heads,)](*inputs, *weights, *logs, *numbers, STARTED=started, **chunks.weights)
    return weights, dict(zip(_LOGS, logs[2:]))


def _add_values(chunks: _Chunks, competition: Tensor, sums: Tensor) -> None:
    """Write Σ kᵀ (w v) of each chunk to ``sums`` (B H, G + 1, d, e)."""
    from . import chunks_kernels as kernels

    inputs = (chunks.k, chunks.v, chunks.padding, chunks.v, competition)
    numbers = (*chunks.counts, *strides(chunks.k), *strides(chunks.v))
    kernels.value_sums[chunks.value_grid](*inputs, sums, sums, *numbers, **chunks.value, REVERSED=False)


def _outputs(chunks: _Chunks, weights: _Weights, kv_sums: Tensor) -> Tensor:
    """The output (B, H, n, e), in v's dtype."""
    from . import chunks_kernels as kernels

    out = chunks.v.new_empty(chunks.v.shape)
    inputs = (chunks.q, chunks.k, chunks.v, chunks.padding, weights.competition, weights.scale, kv_sums)
    numbers = (*chunks.counts, *chunks.qk_strides, *strides(chunks.v))
    kernels.outputs[chunks.value_grid](*inputs, out, *numbers, **chunks.value)
    return out


def _add_output_gradients(chunks: _Chunks, out: Tensor, grad_out: Tensor, scale: Tensor, sums: Tensor) -> Tensor:
    """Write Σ qᵀ (s ∂out) of each chunk to ``sums`` (B H, G + 1, d, e), from the end; the gradient of log s.

    The output is a multiple of the scale s, so that this gradient is the product of the output and its own gradient: a
    part (B, H, n) from each block of e channels.
    """
    from . import chunks_kernels as kernels

    dots = chunks.numbers(chunks.value_grid[1])
    inputs = (chunks.q, grad_out, chunks.padding, out, scale)
    numbers = (*chunks.counts, *strides(chunks.q), *strides(grad_out))
    kernels.value_sums[chunks.value_grid](*inputs, sums, dots, *numbers, **chunks.value, REVERSED=True)
    return dots


def _values_backward(
    chunks: _Chunks, grad_out: Tensor, weights: _Weights, reversed_kv_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of v (B, H, n, e) and of competition: a part (B, H, n) from each block of e channels."""
    from . import chunks_kernels as kernels

    grad_v, grad_competition = chunks.v.new_empty(chunks.v.shape), chunks.numbers(chunks.value_grid[1])
    inputs = (chunks.q, chunks.k, chunks.v, grad_out, chunks.padding, *weights[:2], reversed_kv_sums)
    numbers = (*chunks.counts, *chunks.qk_strides, *strides(chunks.v), *strides(grad_out))
    kernels.values_backward[chunks.value_grid](*inputs, grad_v, grad_competition, *numbers, **chunks.value)
    return grad_v, grad_competition


def _weights_backward(
    chunks: _Chunks,
    flows: _Flows,
    weights: _Weights,
    grad_competition: Tensor,
    grad_log_scale: Tensor,
    grad_state: State,
) -> tuple[Tensor, State]:
    """Gradients of I, Î and Ô (3, B, H, n), and of the logarithms before the tokens (B, H).

    The gradient of I is the part that does not pass through Ô.
    """
    from . import chunks_kernels as kernels

    grads, (logs, started) = chunks.numbers(3), chunks.logs(grad_state)
    inputs = (flows.incoming, flows.conserved_outgoing, chunks.padding, chunks.count)
    inputs = (*inputs, weights.competition, weights.allocation)
    numbers = (chunks.counts[0], chunks.counts[1], chunks.count_stride, chunks.options.clamp)
    parts = {**chunks.weights, "STARTED": started, "PARTS": chunks.value_grid[1]}
    kernels.weights_backward[(chunks.heads,)](
        *inputs, grad_competition, grad_log_scale, *grads, *logs, *numbers, **parts
    )
    return grads, dict(zip(_LOGS, logs[2:]))


def _flows_backward(
    chunks: _Chunks,
    flows: _Flows,
    grad_direct: Tensor,
    grad_conserved: Sequence[Tensor],
    reversed_conserved_sums: Tensor,
    first: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of I and O (2, B, H, n), sums weighted with them, from the end (2, B H, G + 1, d), and the last sums.

    ``grad_direct`` is the gradient of I that does not pass through Ô, ``grad_conserved`` are those of Î and Ô.
    """
    from . import chunks_kernels as kernels

    reversed_sums, grads = chunks.vector_sums(), chunks.numbers(2)
    inputs = (chunks.q, chunks.k, chunks.padding, chunks.count, *flows[:2], *grad_conserved, grad_direct)
    numbers = (*chunks.counts, chunks.count_stride, chunks.eps, *chunks.qk_strides)
    kernels.flows_backward[chunks.grid](
        *inputs, reversed_conserved_sums, *grads, reversed_sums, *numbers, **chunks.flow
    )
    return grads, reversed_sums, chunks.so_far(reversed_sums, *first)


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
