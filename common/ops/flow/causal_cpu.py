"""Causal Flow-Attention in blocks that stay in a CPU's caches, with the backward pass by hand.

Between the passes only inputs and output are kept, as softmax attention keeps them. The backward pass forms the state
before each block and its flows once more, and then goes through the blocks from the last to the first.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State
from ..shared.tracing import runs_eagerly
from .causal import (
    STATE_SUMS,
    CausalInputs,
    ChunkFlow,
    attention_in_chunks,
    chunks_flow,
    chunks_forward,
    state_shapes,
)
from .causal_backward import chunks_backward
from .options import FlowOptions

#: Numbers in the q of a block, for each thread: 256 tokens of 8 heads of 64 channels, whose temporaries fit the caches.
#: Of a quarter, a half and twice as many none was faster.
BLOCK_NUMBERS = 2**17
_Block = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v and padding
_Formed = tuple[State | None, ChunkFlow | None]  # of a block: the state before it, and its flows


def causal_attention_in_blocks(inputs: CausalInputs) -> tuple[Tensor, State]:
    """As ``attention_in_chunks``; O(n + n d e / block) memory besides inputs, output and gradients, if any."""
    q, k, v, padding, options, chunk_size, state = inputs
    count, *sums = _flat(state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *sums)):
        out, count, *sums = _InBlocks.apply(options, chunk_size, padding, count, q, k, v, *sums)
        return out, _state(count, sums)
    return _forward(inputs, _block_lengths(q, chunk_size))


class _InBlocks(torch.autograd.Function):
    """Both passes; options, chunk_size, padding and count have no gradient."""

    @staticmethod
    def forward(ctx: Any, options: FlowOptions, chunk_size: int, padding, count, q, k, v, *sums) -> tuple[Tensor, ...]:
        # Kept, because the number of threads, on which they depend, may have changed when the backward pass runs.
        lengths = _block_lengths(q, chunk_size)
        ctx.options, ctx.chunk_size, ctx.lengths = options, chunk_size, lengths
        out, state = _forward(CausalInputs(q, k, v, padding, options, chunk_size, _state(count, sums)), lengths)
        ctx.save_for_backward(padding, q, k, v, out, count, *sums)
        ctx.mark_non_differentiable(state["count"])
        ctx.set_materialize_grads(False)
        return (out, *_flat(state))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any, *grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        padding, q, k, v, out, count, *sums = ctx.saved_tensors
        zero, shapes = torch.zeros((), dtype=compute_dtype(q), device=q.device), state_shapes(q, v)
        grad_sums = [zero.expand(shapes[name]) if x is None else x for name, x in zip(STATE_SUMS, grad_sums)]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        by_graph = torch.is_grad_enabled() or not runs_eagerly(grad_out)
        with autocast_off(q):
            inputs = CausalInputs(q, k, v, padding, ctx.options, ctx.chunk_size, _state(count, sums))
            if by_graph:
                grads = _graph_gradients(inputs, grad_out, grad_sums)
            else:
                grads = _backward(inputs, ctx.lengths, out, grad_out, grad_sums)
        return (None, None, None, None, *grads)


def _flat(state: State | None) -> list[Tensor | None]:
    """A state as a list, as autograd functions take it."""
    return [None] * (1 + len(STATE_SUMS)) if state is None else [state["count"], *(state[x] for x in STATE_SUMS)]


def _state(count: Tensor | None, sums: Sequence[Tensor | None]) -> State | None:
    """The inverse of ``_flat``."""
    return None if count is None else {"count": count, **dict(zip(STATE_SUMS, sums))}


def _block_lengths(q: Tensor, chunk_size: int) -> list[int]:
    """Tokens of each block: whole chunks, and at the end the tokens that make no whole chunk.

    These are a block of their own, since filling their chunk up would copy every tensor.
    """
    batch, heads, length, d = q.shape
    size = min(chunk_size, length)
    rest = length % size
    numbers = max(batch * heads * d * size, 1)  # of a chunk; none in an empty batch
    most = max(BLOCK_NUMBERS * torch.get_num_threads() // numbers, 1) * size
    blocks, shorter = divmod(length - rest, most)
    return [x for x in (*[most] * blocks, shorter, rest) if x > 0]


def _blocks(inputs: CausalInputs, lengths: list[int]) -> list[_Block]:
    """q, k, v and padding in blocks of ``lengths`` tokens."""
    padding = inputs.padding
    paddings = itertools.repeat(None) if padding is None else padding.split(lengths, dim=1)
    return list(zip(*(x.split(lengths, dim=2) for x in inputs[:3]), paddings))


def _forward(inputs: CausalInputs, lengths: list[int]) -> tuple[Tensor, State]:
    """The output, shaped as v and in its dtype, and the state after it."""
    out, begin = torch.empty_like(inputs.v), 0  # laid out as v: a host has heads inside
    state = inputs.state
    for block in _blocks(inputs, lengths):
        total, scale, state = chunks_forward(CausalInputs(*block, inputs.options, inputs.chunk_size, state))
        end = begin + total.shape[2]
        torch.mul(total, scale, out=out[:, :, begin:end])
        begin = end
    return out, state


def _formed_again(inputs: CausalInputs, blocks: list[_Block]) -> list[_Formed]:
    """The state before each block and its flows. Those of the last block are left to its backward pass."""
    formed, state = [], inputs.state
    for block in blocks[:-1]:
        flow, next_state = chunks_flow(CausalInputs(*block, inputs.options, inputs.chunk_size, state))
        formed.append((state, flow))
        state = next_state
    return [*formed, (state, None)]


def _backward(
    inputs: CausalInputs, lengths: list[int], out: Tensor, grad_out: Tensor, grad_sums: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of q, k and v, and of the sums of the first state."""
    grads = [torch.empty_like(x) for x in inputs[:3]]
    end, grad_state = out.shape[2], dict(zip(STATE_SUMS, grad_sums))
    blocks = _blocks(inputs, lengths)
    formed = _formed_again(inputs, blocks)
    while formed:
        block, (state, flow) = blocks.pop(), formed.pop()
        begin = end - block[0].shape[2]
        arguments = CausalInputs(*block, inputs.options, inputs.chunk_size, state)
        results = (x[:, :, begin:end] for x in (out, grad_out))
        grad_state = chunks_backward(arguments, flow, *results, grad_state, [x[:, :, begin:end] for x in grads])
        end = begin
    return grads + [None if inputs.state is None else grad_state[name] for name in STATE_SUMS]


def _graph_gradients(inputs: CausalInputs, grad_out: Tensor, grad_sums: Sequence[Tensor]) -> list[Tensor | None]:
    """The same gradients by torch's graph of the whole sequence."""
    count = None if inputs.state is None else inputs.state["count"]

    def attend(q: Tensor, k: Tensor, v: Tensor, *sums: Tensor | None) -> tuple[Tensor, ...]:
        state = _state(count, sums)
        arguments = CausalInputs(q, k, v, inputs.padding, inputs.options, inputs.chunk_size, state)
        out, next_state = attention_in_chunks(arguments)
        return (out.to(v.dtype), *(next_state[name] for name in STATE_SUMS))

    return graph_gradients(attend, [*inputs[:3], *_flat(inputs.state)[1:]], [grad_out, *grad_sums])
