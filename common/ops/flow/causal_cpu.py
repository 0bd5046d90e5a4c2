"""Causal Flow-Attention in blocks that fit a CPU's caches, with a hand-written backward pass.

Saved for the backward pass are inputs, output, the flows (some numbers for each token and head) and the state before
each block; features and scores are recomputed. The backward pass goes through the blocks from the last to the first.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State
from ..shared.tracing import runs_eagerly
from .causal import STATE_SUMS, CausalInputs, ChunkFlow, attention_in_chunks, chunks_forward, state_shapes
from .causal_backward import chunks_backward
from .options import FlowOptions
from .workspace import Workspaces

#: Numbers in the q of a block, for each thread: 256 tokens of 8 heads of 64 channels, whose temporaries fit the caches.
#: A quarter, a half and twice as many were not faster.
BLOCK_NUMBERS = 2**17
#: Minimum number of tokens of a block, if the input has them: one matrix is kept for each block and head.
_BLOCK_TOKENS = 256
_Block = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v and padding
_Part = tuple[slice, slice]  # rows of the batch, heads


class _Plan(NamedTuple):
    """How an input is cut into blocks; kept, because the number of threads may be different in the backward pass."""

    parts: list[_Part]  # independent of each other
    lengths: list[int]  # tokens of each block, in every part


class _Kept(NamedTuple):
    """Tensors of a block that the backward pass needs in addition to the block's inputs and output."""

    state: State | None  # before the block
    flow: ChunkFlow


def causal_attention_in_blocks(inputs: CausalInputs) -> tuple[Tensor, State]:
    """``attention_in_chunks`` in O(n + n d e / block) memory in addition to inputs, output and gradients.

    Saved for a backward pass: inputs, output, flows O(n) and a state O(d e) for each block.
    """
    q, k, v, padding, options, chunk_size, state = inputs
    count, *sums = _flat(state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *sums)):
        out, count, *sums = _InBlocks.apply(options, chunk_size, padding, count, q, k, v, *sums)
        return out, _state(count, sums)
    return _forward(inputs, _plan(q, chunk_size), None)


class _InBlocks(torch.autograd.Function):
    """Both passes; options, chunk_size, padding and count have no gradient."""

    @staticmethod
    def forward(ctx: Any, options: FlowOptions, chunk_size: int, padding, count, q, k, v, *sums) -> tuple[Tensor, ...]:
        kept: list[_Kept] = []
        ctx.options, ctx.chunk_size, ctx.plan = options, chunk_size, _plan(q, chunk_size)
        inputs = CausalInputs(q, k, v, padding, options, chunk_size, _state(count, sums))
        out, state = _forward(inputs, ctx.plan, kept)
        of_blocks = [x for before, flow in kept for x in (*_flat(before), *flow)]
        ctx.save_for_backward(padding, q, k, v, out, count, *sums, *of_blocks)
        ctx.mark_non_differentiable(state["count"])
        ctx.set_materialize_grads(False)
        return (out, *_flat(state))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any, *grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        padding, q, k, v, out, count, *saved = ctx.saved_tensors
        sums, of_blocks = saved[: len(STATE_SUMS)], saved[len(STATE_SUMS) :]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        by_graph = torch.is_grad_enabled() or not runs_eagerly(grad_out)
        grad_state = _gradients(grad_sums, q, v, zeros=by_graph)
        with autocast_off(q):
            inputs = CausalInputs(q, k, v, padding, ctx.options, ctx.chunk_size, _state(count, sums))
            if by_graph:
                grads = _graph_gradients(inputs, grad_out, grad_state)
            else:
                grads = _backward(inputs, ctx.plan, _kept(of_blocks), out, grad_out, grad_state)
        return (None, None, None, None, *grads)


def _flat(state: State | None) -> list[Tensor | None]:
    """A state as a list, for autograd functions."""
    return [None] * (1 + len(STATE_SUMS)) if state is None else [state["count"], *(state[x] for x in STATE_SUMS)]


def _state(count: Tensor | None, sums: Sequence[Tensor | None]) -> State | None:
    """The inverse of ``_flat``."""
    return None if count is None else {"count": count, **dict(zip(STATE_SUMS, sums))}


def _gradients(grad_sums: Sequence[Tensor | None], q: Tensor, v: Tensor, zeros: bool) -> State:
    """The gradients of a state's sums by name. If there are none: zeros with ``zeros``, otherwise empty."""
    if not zeros and all(x is None for x in grad_sums):
        return {}
    zero, shapes = torch.zeros((), dtype=compute_dtype(q), device=q.device), state_shapes(q, v)
    return {name: zero.expand(shapes[name]) if x is None else x for name, x in zip(STATE_SUMS, grad_sums)}


def _kept(tensors: Sequence[Tensor | None]) -> list[_Kept]:
    """Split the flat sequence of all saved tensors into the ``_Kept`` of each block."""
    of_state = 1 + len(STATE_SUMS)
    width = of_state + len(ChunkFlow._fields)
    blocks = (tensors[i : i + width] for i in range(0, len(tensors), width))
    return [_Kept(_state(x[0], x[1:of_state]), ChunkFlow(*x[of_state:])) for x in blocks]


def _plan(q: Tensor, chunk_size: int) -> _Plan:
    """Parts of some heads of some rows, so that blocks of enough tokens fit, and in each part blocks of whole chunks.

    Tokens at the end that do not fill a chunk are a separate block, since filling the chunk would copy every tensor.
    """
    batch, heads, length, d = q.shape
    numbers = BLOCK_NUMBERS * torch.get_num_threads()
    fitting = max(numbers // max(min(length, _BLOCK_TOKENS) * d, 1), 1)  # heads
    heads_each, rows_each = min(fitting, max(heads, 1)), max(fitting // max(heads, 1), 1)
    parts = [
        (slice(row, row + rows_each), slice(head, head + heads_each))
        for row in range(0, max(batch, 1), rows_each)
        for head in range(0, max(heads, 1), heads_each)
    ]
    size = min(chunk_size, length)
    chunks, rest = divmod(length, size)
    of_chunk = max(min(rows_each, batch) * heads_each * d * size, 1)
    # At most twice as many chunks as fit: a short block needs almost as many calls as a long one.
    blocks = max(chunks // max(numbers // of_chunk, 1), 1)
    each, longer = divmod(chunks, blocks)
    lengths = [(each + (i < longer)) * size for i in range(blocks)]
    return _Plan(parts, lengths + [rest] if rest else lengths)


def _part_of(inputs: CausalInputs, part: _Part) -> CausalInputs:
    """The inputs of a part."""
    rows, _ = part
    padding = None if inputs.padding is None else inputs.padding[rows]
    state = None if inputs.state is None else {"count": inputs.state["count"][rows], **_sums_of(inputs.state, part)}
    return CausalInputs(*(x[part] for x in inputs[:3]), padding, inputs.options, inputs.chunk_size, state)


def _sums_of(state: State, part: _Part) -> State:
    """The sums of a part of a state, or of gradients of one."""
    return {name: state[name][part] for name in STATE_SUMS if name in state}


def _blocks(inputs: CausalInputs, lengths: list[int]) -> list[_Block]:
    """q, k, v and padding in blocks of ``lengths`` tokens."""
    padding = inputs.padding
    paddings = itertools.repeat(None) if padding is None else padding.split(lengths, dim=1)
    return list(zip(*(x.split(lengths, dim=2) for x in inputs[:3]), paddings))


def _forward(inputs: CausalInputs, plan: _Plan, kept: list[_Kept] | None) -> tuple[Tensor, State]:
    """The output, shaped as v and in its dtype, and the state after it; ``kept`` receives one entry for each block."""
    out = torch.empty_like(inputs.v)  # in the memory layout of v, which a host may have with heads inside
    spaces = Workspaces(inputs.chunk_size, backward=False)
    if len(plan.parts) == 1:
        return out, _forward_part(inputs, plan.lengths, spaces, out, kept)
    like = {"dtype": compute_dtype(out), "device": out.device}
    after = {name: torch.empty(shape, **like) for name, shape in state_shapes(inputs.q, inputs.v).items()}
    after["count"] = after["count"].long()
    for part in plan.parts:
        state = _forward_part(_part_of(inputs, part), plan.lengths, spaces, out[part], kept)
        after["count"][part[0]] = state["count"]
        for name, whole in _sums_of(after, part).items():
            whole.copy_(state[name])
    return out, after


def _forward_part(
    inputs: CausalInputs, lengths: list[int], spaces: Workspaces, out: Tensor, kept: list[_Kept] | None
) -> State:
    """Write the output of a part into ``out``; return the state after it."""
    state, begin = inputs.state, 0
    for block in _blocks(inputs, lengths):
        arguments = CausalInputs(*block, inputs.options, inputs.chunk_size, state)
        end = begin + block[0].shape[2]
        total, scale, next_state, flow = chunks_forward(arguments, spaces.of(block[0], block[2]))
        torch.mul(total, scale, out=out[:, :, begin:end])
        del total  # frees the workspace, which the next block may need in another size
        if kept is not None:
            kept.append(_Kept(state, flow))
        begin, state = end, next_state
    return state


def _backward(
    inputs: CausalInputs, plan: _Plan, kept: list[_Kept], out: Tensor, grad_out: Tensor, grad_state: State
) -> list[Tensor | None]:
    """Gradients of q, k and v, and of the sums of the first state."""
    grads = [torch.empty_like(x) for x in inputs[:3]]
    tensors, spaces = (out, grad_out, *grads), Workspaces(inputs.chunk_size, backward=True)
    if len(plan.parts) == 1:
        before = _backward_part(inputs, plan.lengths, spaces, kept, tensors, grad_state)
        return grads + [None if inputs.state is None else before[name] for name in STATE_SUMS]
    before = None if inputs.state is None else {name: torch.empty_like(inputs.state[name]) for name in STATE_SUMS}
    blocks = len(plan.lengths)
    for i, part in enumerate(plan.parts):
        of_part = kept[i * blocks : (i + 1) * blocks], [x[part] for x in tensors], _sums_of(grad_state, part)
        part_before = _backward_part(_part_of(inputs, part), plan.lengths, spaces, *of_part)
        if before is not None:
            for name, whole in _sums_of(before, part).items():
                whole.copy_(part_before[name])
    return grads + [None if before is None else before[name] for name in STATE_SUMS]


def _backward_part(
    inputs: CausalInputs,
    lengths: list[int],
    spaces: Workspaces,
    kept: list[_Kept],
    tensors: Sequence[Tensor],
    grad_state: State,
) -> State:
    """Write a part's gradients of q, k and v; return those of the sums of its first state.

    ``tensors`` are the output, its gradient, and the tensors to write to.
    """
    end = inputs.q.shape[2]
    for block, (state, flow) in zip(reversed(_blocks(inputs, lengths)), reversed(kept)):
        begin = end - block[0].shape[2]
        arguments = CausalInputs(*block, inputs.options, inputs.chunk_size, state)
        out, grad_out, *grads = (x[:, :, begin:end] for x in tensors)
        gradients = (out, grad_out, grad_state, grads)
        grad_state = chunks_backward(arguments, flow, *gradients, spaces.of(block[0], block[2]))
        end = begin
    return grad_state


def _graph_gradients(inputs: CausalInputs, grad_out: Tensor, grad_state: State) -> list[Tensor | None]:
    """The gradients of ``_backward`` by torch's autograd graph of the whole sequence."""
    count = None if inputs.state is None else inputs.state["count"]

    def attend(q: Tensor, k: Tensor, v: Tensor, *sums: Tensor | None) -> tuple[Tensor, ...]:
        state = _state(count, sums)
        arguments = CausalInputs(q, k, v, inputs.padding, inputs.options, inputs.chunk_size, state)
        out, next_state = attention_in_chunks(arguments)
        return (out.to(v.dtype), *(next_state[name] for name in STATE_SUMS))

    return graph_gradients(attend, [*inputs[:3], *_flat(inputs.state)[1:]], [grad_out, *grad_state.values()])
