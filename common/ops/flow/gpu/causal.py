"""Causal Flow-Attention by Triton kernels: Flowformer (ICML 2022), Algorithm 2, as a function with gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shared.autograd import graph_gradients
from ...shared.gpu import dispatch
from ...shared.gpu.first_use import FirstUse, sample_like, sample_padding
from ...shared.gpu.launch import on_device_of, tile_rows
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs, attention_in_chunks, chunk_positions, state_shapes
from ..causal_weights import Positions
from ..options import FlowOptions
from . import chunks

#: The kernels' name in the warning when they fail.
NAME = "flow_attention"


def applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal Flow-Attention of q, k (B, H, n, d) and v (B, H, n, e) goes through kernels: d up to 128."""
    return dispatch.applies(NAME, q, k, v) and q.shape[3] <= dispatch.MAX_CHANNELS


def causal_attention(inputs: CausalInputs) -> tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e), in v's dtype, and the state after the tokens.

    float32, float16 or bfloat16, d up to 128, any n and e. Gradients of gradients come from plain PyTorch.
    Cost as in plain PyTorch, with (n / C) d e numbers of temporaries.
    """
    state = inputs.state
    positions = chunk_positions(inputs.q, inputs.padding, inputs.q.shape[2], state)  # of the tokens as a single chunk
    count = None if state is None else state["count"]
    call = _Call(inputs.padding, count, inputs.options, inputs.chunk_size, positions)
    sums = [None] * len(STATE_SUMS) if state is None else [state[name] for name in STATE_SUMS]
    out, count, *sums = _CausalFlowAttention.apply(inputs.q, inputs.k, inputs.v, call, *sums)
    return out, {"count": count, **dict(zip(STATE_SUMS, sums))}


def first_use(inputs: CausalInputs) -> FirstUse:
    """Comparison with plain PyTorch, on three tiles of tokens, before the first use of kernels for such inputs."""
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


class _Call(NamedTuple):
    """The arguments that have no gradient."""

    padding: Tensor | None  # (B, n), True = padding
    count: Tensor | None  # real tokens before these (B,), int64
    options: FlowOptions
    chunk_size: int  # of plain PyTorch; kernels have their own
    positions: Positions  # of the tokens as a single chunk

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, sums: Sequence[Tensor | None]) -> CausalInputs:
        """All arguments; ``sums`` are those of the state before the tokens, all None if there is none."""
        state = None if sums[0] is None else {"count": self.count, **dict(zip(STATE_SUMS, sums))}
        return CausalInputs(q, k, v, self.padding, self.options, self.chunk_size, state)


class _CausalFlowAttention(torch.autograd.Function):
    """q, k, v and the sums of a state, or None for each -> the output, the count and the sums of the next."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call, *sums: Tensor | None) -> tuple[Tensor, ...]:
        with on_device_of(q):
            out, kept, state = chunks.forward(call.inputs(q, k, v, sums), call.positions)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, *sums, *kept)
        ctx.mark_non_differentiable(state["count"])
        ctx.set_materialize_grads(False)
        return (out, state["count"], *(state[name] for name in STATE_SUMS))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None, *grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (q, k, v, out, *saved) = ctx.call, ctx.saved_tensors
        sums, kept = saved[: len(STATE_SUMS)], saved[len(STATE_SUMS) :]
        needed = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:])
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_state = _grad_state(grad_sums, q, v)

        def by_pytorch() -> list[Tensor | None]:
            return _graph_gradients((q, k, v, *sums), call, grad_out, grad_state)

        def by_kernels() -> tuple[Tensor | None, ...]:
            with on_device_of(q):
                inputs = call.inputs(q, k, v, sums)
                return chunks.backward(inputs, call.positions, kept, out, grad_out, grad_state)

        # With create_graph=True gradients must be differentiable, which those of kernels are not.
        in_graph = torch.is_grad_enabled()
        grads = by_pytorch() if in_graph else dispatch.guarded(NAME, by_kernels, by_pytorch)
        grads = [grad if need else None for grad, need in zip(grads, needed)]
        return (*grads[:3], None, *grads[3:])


def _grad_state(grads: tuple[Tensor | None, ...], q: Tensor, v: Tensor) -> State | None:
    """The gradients of a state's sums, None if all are None."""
    if all(grad is None for grad in grads):
        return None
    shapes = state_shapes(q, v)
    zeros = (q.new_zeros(shapes[name], dtype=torch.float32) for name in STATE_SUMS)
    return {name: x if grad is None else grad for name, grad, x in zip(STATE_SUMS, grads, zeros)}


def _graph_gradients(
    tensors: tuple[Tensor | None, ...], call: _Call, grad_out: Tensor, grad_state: State | None
) -> list[Tensor | None]:
    """The gradients of q, k, v and the sums, recomputed in plain PyTorch."""
    names = () if grad_state is None else STATE_SUMS

    def attend(q: Tensor, k: Tensor, v: Tensor, *sums: Tensor | None) -> tuple[Tensor, ...]:
        out, state = attention_in_chunks(call.inputs(q, k, v, sums))
        return (out.to(v.dtype), *(state[name] for name in names))

    return graph_gradients(attend, tensors, (grad_out, *(grad_state[name] for name in names)))
