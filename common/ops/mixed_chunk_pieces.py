"""Causal mixed chunk attention with relu², piece by piece: a function with a backward pass of its own."""

from typing import Callable, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

from .chunks import autocast_off
from .eager import runs_eagerly
from .freed_memory import keep_freed_memory
from .mixed_chunk_piece import Piece, Tokens, backward_piece, flat_chunks, forward_piece, pieces

Plain = Callable[..., Tensor]


def attend_in_pieces(tokens: Tokens, bias: Optional[Tensor], chunk_size: int, plain: Plain) -> Tensor:
    """Both terms of causal mixed chunk attention, (B, H, n, s) and (B, H, n, e) -> (B, H, n, e), float32 or float64.

    ``bias`` (1 or H, C, C) or None, C = ``chunk_size``; padding stands behind the real tokens and is zero. Gradients of
    gradients and batches of gradients are those of ``plain(*tokens, bias)``. O(n (C (s + e) + s e)) time; beside the
    inputs, the output and their gradients, O(n s e / C) memory.
    """
    keep_freed_memory()
    return _InPieces.apply(*tokens, bias, chunk_size, plain)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_quad, k_quad, q_lin, k_lin, v, bias, chunk_size: int, plain: Plain) -> Tensor:
        tokens = Tokens(q_quad, k_quad, q_lin, k_lin, v)
        batch, heads, n, e = v.shape
        size = min(chunk_size, n)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        sums = v.new_empty(batch, heads, -(-n // size), q_lin.shape[3], e)
        earlier = v.new_zeros(batch, heads, q_lin.shape[3], e)
        for piece in pieces(batch, n, size):
            chunks = _chunks(tokens, piece, size)
            result, before, earlier[piece.rows] = forward_piece(chunks, earlier[piece.rows], bias, chunk_size)
            sums[piece.rows, :, piece.chunks] = before
            _put(out, piece, result)
        ctx.save_for_backward(*tokens, bias, sums)
        ctx.chunk_size, ctx.plain = chunk_size, plain
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        *inputs, sums = ctx.saved_tensors
        with autocast_off(sums):  # the forward pass's does not reach here
            if torch.is_grad_enabled() or not runs_eagerly(gradient):
                found = _plain_gradients(ctx.plain, inputs, gradient)
            else:
                found = _gradients(ctx, Tokens(*inputs[:5]), inputs[5], sums, gradient)
        return (*found, None, None)


def _plain_gradients(plain: Plain, inputs: Sequence[Optional[Tensor]], gradient: Tensor) -> List[Optional[Tensor]]:
    """Gradients of ``plain(*inputs)`` that have gradients themselves, None of inputs that want none."""
    with torch.enable_grad():
        # Views, since one tensor may be several inputs.
        views = [x if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x in views if x is not None and x.requires_grad]
        found: Iterator[Tensor] = iter(torch.autograd.grad(plain(*views), wanted, gradient, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in views]


def _gradients(ctx, tokens: Tokens, bias: Optional[Tensor], sums: Tensor, gradient: Tensor) -> List[Optional[Tensor]]:
    """Of the five tensors and the bias, without a graph."""
    batch, _, n, _ = tokens.v.shape
    size = min(ctx.chunk_size, n)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
    later = torch.zeros_like(sums[:, :, 0])
    of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[5] else None
    for piece in reversed(list(pieces(batch, n, size))):
        chunks, before = _chunks(tokens, piece, size), sums[piece.rows, :, piece.chunks]
        of_piece = flat_chunks(gradient[piece.rows, :, piece.tokens], size)
        results, later[piece.rows] = backward_piece(
            chunks, before, later[piece.rows], bias, of_bias, ctx.chunk_size, of_piece
        )
        for out, result in zip(found, results):
            _put(out, piece, result)
    return [*found, of_bias]


def _chunks(tokens: Tokens, piece: Piece, size: int) -> Tokens:
    """What ``piece`` has of each tensor, in chunks of ``size``: (B H G, C, c)."""
    return Tokens(*(flat_chunks(x[piece.rows, :, piece.tokens], size) for x in tokens))


def _put(out: Tensor, piece: Piece, result: Tensor) -> None:
    """Write (B H G, C, c) where ``out`` (B, H, n, c) has this piece."""
    place = out[piece.rows, :, piece.tokens]
    place.copy_(result.view(*place.shape[:2], -1, place.shape[3])[:, :, : place.shape[2]])
