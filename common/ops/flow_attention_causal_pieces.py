"""Causal Flow-Attention in pieces that stay in a CPU's caches, with a backward pass by hand.

Between the passes nothing is kept but inputs, output, the state before each piece, and flows: some numbers for each
token. Features and scores are formed again. Legend: ``flow_attention``.
"""

import itertools
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import autocast_off, compute_dtype
from .eager import runs_eagerly
from .flow_attention_causal_backward import chunks_backward
from .flow_attention_causal_chunks import CausalInput, ChunkFlow, attention_in_chunks, chunks_forward, state_shapes
from .flow_options import FlowOptions
from .freed_memory import keep_freed_memory

# Numbers in the q of a piece, for each thread: what a piece needs stays in the caches. 256 tokens of 8 heads of 64
# channels; of a quarter, a half and twice as many none was faster.
_PIECE = 2**17
_SUMS = ("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming", "log_competition", "log_allocation", "sum_kv")
_Piece = Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]
_Kept = Tuple[Optional[State], ChunkFlow]  # of a piece: the state before it, and its flows


def attention_in_pieces(given: CausalInput) -> Tuple[Tensor, State]:
    """As ``attention_in_chunks``; O(n + n d e / piece) memory besides inputs, output and gradients, if any."""
    keep_freed_memory()
    q, k, v, padding, options, chunk_size, state = given
    count, *sums = _flat(state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *sums)):
        out, count, *sums = _InPieces.apply(options, chunk_size, padding, count, q, k, v, *sums)
        return out, _state(count, sums)
    return _forward(given, _piece_lengths(q, chunk_size), None)


class _InPieces(torch.autograd.Function):
    """Both passes; options, chunk_size, padding and count have no gradient."""

    @staticmethod
    def forward(ctx: Any, options: FlowOptions, chunk_size: int, padding, count, q, k, v, *sums) -> Tuple[Tensor, ...]:
        kept: List[_Kept] = []
        # The number of threads, which lengths depend on, may be another one by the time of the backward pass.
        ctx.options, ctx.chunk_size, ctx.lengths = options, chunk_size, _piece_lengths(q, chunk_size)
        given = CausalInput(q, k, v, padding, options, chunk_size, _state(count, sums))
        out, after = _forward(given, ctx.lengths, kept)
        ctx.save_for_backward(padding, q, k, v, out, *(x for state, flow in kept for x in (*_flat(state), *flow)))
        ctx.mark_non_differentiable(after["count"])
        ctx.set_materialize_grads(False)
        return (out, *_flat(after))

    @staticmethod
    def backward(
        ctx: Any, grad_out: Optional[Tensor], _: Any, *grad_sums: Optional[Tensor]
    ) -> Tuple[Optional[Tensor], ...]:
        padding, q, k, v, out, *kept = ctx.saved_tensors
        zero, shapes = torch.zeros((), dtype=compute_dtype(q), device=q.device), state_shapes(q, v)
        grad_sums = [zero.expand(shapes[name]) if x is None else x for name, x in zip(_SUMS, grad_sums)]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        width = 1 + len(_SUMS) + len(ChunkFlow._fields)
        kept = [_kept(kept[i : i + width]) for i in range(0, len(kept), width)]
        # A graph for derivatives of the gradients, and for batches of gradients (is_grads_batched).
        as_graph = torch.is_grad_enabled() or not runs_eagerly(grad_out)
        with autocast_off(q):
            given = CausalInput(q, k, v, padding, ctx.options, ctx.chunk_size, kept[0][0])
            if as_graph:
                grads = _differentiable(given, grad_out, grad_sums)
            else:
                grads = _backward(given, ctx.lengths, kept, out, grad_out, grad_sums)
        return (None, None, None, None, *grads)


def _flat(state: Optional[State]) -> List[Optional[Tensor]]:
    return [None] * (1 + len(_SUMS)) if state is None else [state["count"], *(state[name] for name in _SUMS)]


def _state(count: Optional[Tensor], sums: Sequence[Optional[Tensor]]) -> Optional[State]:
    return None if count is None else {"count": count, **dict(zip(_SUMS, sums))}


def _kept(tensors: Sequence[Optional[Tensor]]) -> _Kept:
    """What ``_flat`` made of a state, and flows behind it."""
    count, *rest = tensors
    return _state(count, rest[: len(_SUMS)]), ChunkFlow(*rest[len(_SUMS) :])


def _piece_lengths(q: Tensor, chunk_size: int) -> List[int]:
    """Tokens of each piece: whole chunks, and last what is less than one; filling it up would copy every tensor."""
    batch, heads, length, d = q.shape
    size = min(chunk_size, length)
    rest = length % size
    numbers = max(batch * heads * d * size, 1)  # of a chunk; none in an empty batch
    most = max(_PIECE * torch.get_num_threads() // numbers, 1) * size
    pieces, shorter = divmod(length - rest, most)
    return [x for x in (*[most] * pieces, shorter, rest) if x > 0]


def _pieces(given: CausalInput, lengths: List[int]) -> List[_Piece]:
    """A sequence in pieces of ``lengths``."""
    padding = given.padding
    paddings = itertools.repeat(None) if padding is None else padding.split(lengths, dim=1)
    return list(zip(*(x.split(lengths, dim=2) for x in given[:3]), paddings))


def _forward(given: CausalInput, lengths: List[int], kept: Optional[List[_Kept]]) -> Tuple[Tensor, State]:
    """The output, shaped as v and in its dtype, and the state after it; ``kept`` gets what is for the backward pass."""
    outputs, begin = torch.empty_like(given.v, memory_format=torch.contiguous_format), 0
    state = given.state
    for piece in _pieces(given, lengths):
        total, scale, after, flow = chunks_forward(CausalInput(*piece, given.options, given.chunk_size, state))
        if kept is not None:
            kept.append((state, flow))
        end = begin + total.shape[2]
        torch.mul(total, scale, out=outputs[:, :, begin:end])
        begin, state = end, after
    return outputs, state


def _backward(
    given: CausalInput,
    lengths: List[int],
    kept: List[_Kept],
    out: Tensor,
    grad_out: Tensor,
    grad_sums: Sequence[Tensor],
) -> List[Optional[Tensor]]:
    """Gradients of q, k and v, and of the sums of the first state."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[:3]]
    end, grad_state = out.shape[2], dict(zip(_SUMS, grad_sums))
    for piece, (state, flow) in zip(reversed(_pieces(given, lengths)), reversed(kept)):
        begin = end - piece[0].shape[2]
        part = CausalInput(*piece, given.options, given.chunk_size, state)
        results = (x[:, :, begin:end] for x in (out, grad_out))
        grad_state = chunks_backward(part, flow, *results, grad_state, [x[:, :, begin:end] for x in grads])
        end = begin
    return grads + [None if given.state is None else grad_state[name] for name in _SUMS]


def _differentiable(given: CausalInput, grad_out: Tensor, grad_sums: Sequence[Tensor]) -> List[Optional[Tensor]]:
    """The gradients by way of a graph of the whole sequence, which has derivatives of its own."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        out, after = attention_in_chunks(given)
    pairs = zip([out.to(given.v.dtype), *_flat(after)[1:]], [grad_out, *grad_sums])
    results, grads = zip(*(pair for pair in pairs if pair[0].requires_grad))
    inputs = [*given[:3], *_flat(given.state)[1:]]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(results, leaves, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
