"""``channel_decayed_sums`` in blocks that fit a CPU's caches, with a hand-written backward pass.

Saved for the backward pass are the inputs and the sum before each block; everything else is recomputed. The backward
pass goes through the blocks from the last to the first.

Legend, in addition to that of ``channel_decay.py``: a block is g chunks of R rows of the batch, M = R H g chunks of
single heads; a level halves pieces of 2b tokens, N = C / 2b of them in a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import graph_gradients
from .chunks import split_chunks
from .precision import autocast_off
from .tracing import runs_eagerly

#: Numbers in the q of a block, for each thread. An eighth to four times as many were not faster, within noise (8 heads
#: of 32 and of 64 channels, 2,048 and 8,192 tokens).
BLOCK_NUMBERS = 2**17

_Sums = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Block(NamedTuple):
    """The position of a block in (B, H, n, channels)."""

    rows: slice
    heads: slice
    tokens: slice


class _Chunks(NamedTuple):
    """The inputs of a block, and its decays."""

    q: Tensor  # (M, C, f)
    k: Tensor  # (M, C, f)
    v: Tensor  # (M, C, e)
    since: Tensor  # (M, C, f): from the start of a chunk to a token, once all levels are passed
    until: Tensor  # (M, C, f): from a token to the end of the chunk
    total: Tensor  # (R, H, g, f, 1): over the chunk


class _Level(NamedTuple):
    """The second and first halves of the pairs of one level; (M, N, b, f)."""

    half: int  # b
    queries: Tensor  # times ``since``
    keys: Tensor  # times ``until``
    since: Tensor  # decay from the border to a query
    until: Tensor  # decay from a key to the border


def sums_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial: Tensor, size: int, in_graph: _Sums
) -> tuple[Tensor, Tensor]:
    """``channel_decayed_sums`` for chunks of ``size``, a power of two; ``in_graph`` is its version for autograd.

    O(n (C + e) f) time; in addition to inputs, output and their gradients, O(f e) memory for each block.
    """
    inputs = (q, k, v, log_decay, initial)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _InBlocks.apply(size, in_graph, *inputs)
    return _forward(*inputs, size, _blocks(q, size, _numbers()), None)


class _InBlocks(torch.autograd.Function):
    """Both passes; size and function have no gradient."""

    @staticmethod
    def forward(ctx: Any, size: int, in_graph: _Sums, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        before: list[Tensor] = []
        # Kept, because the number of threads may be different in the backward pass.
        ctx.size, ctx.in_graph, ctx.blocks = size, in_graph, _blocks(inputs[0], size, _numbers())
        result = _forward(*inputs, size, ctx.blocks, before)
        ctx.save_for_backward(*inputs, *before)
        return result

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as activation checkpointing allows
        inputs, before = saved[:5], saved[5:]
        with autocast_off(grad_out):  # that of the forward pass does not apply here
            if torch.is_grad_enabled() or not runs_eagerly(grad_out, grad_last):
                return (None, None, *graph_gradients(ctx.in_graph, inputs, (grad_out, grad_last)))
            return (None, None, *_backward(inputs[:4], ctx.size, ctx.blocks, before, grad_out, grad_last))


def _numbers() -> int:
    return BLOCK_NUMBERS * torch.get_num_threads()


def _blocks(q: Tensor, size: int, numbers: int) -> list[_Block]:
    """Blocks of whole chunks of all heads of some rows, in the order of a row's tokens."""
    batch, heads, length, f = q.shape
    fitting = max(numbers // max(heads * size * f, 1), 1)  # chunks
    chunks = min(fitting, (length + size - 1) // size)
    rows = max(fitting // chunks, 1)
    return [
        _Block(slice(row, row + rows), slice(None), slice(token, token + chunks * size))
        for row in range(0, batch, rows)
        for token in range(0, length, chunks * size)
    ]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    size: int,
    blocks: list[_Block],
    before: list[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Output and last sum; the sums before each block are appended to ``before``."""
    out, last = torch.empty_like(v, memory_format=torch.contiguous_format), initial.clone()
    for block in blocks:
        chunks, sums = _chunks(q, k, v, log_decay, block, size), last[block.rows]
        if before is not None:
            before.append(sums.clone())
        scores = _own_scores(chunks)
        for level in _levels(chunks):
            _between(scores, level.half).copy_(level.queries @ level.keys.transpose(-2, -1))
        result = scores @ chunks.v
        earlier = _carried(chunks, sums)
        result.baddbmm_(chunks.q * chunks.since, earlier.flatten(0, 2))
        _write(result, out, block)
    return out, last


def _chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, block: _Block, size: int) -> _Chunks:
    log_decay = split_chunks(log_decay[block], size)  # (R, H, g, C, f)
    decay, total = log_decay.exp().flatten(0, 2), log_decay.sum(3).exp().unsqueeze(-1)
    q, k, v = (split_chunks(x[block], size).flatten(0, 2).contiguous() for x in (q, k, v))
    return _Chunks(q, k, v, decay, torch.ones_like(decay), total)


def _levels(chunks: _Chunks) -> Iterator[_Level]:
    """The levels from single tokens up. Each is valid until the next; at the end ``chunks`` has its decays."""
    half = 1
    while half < chunks.q.shape[1]:
        queries, keys = _pairs(chunks.q, half)[:, :, 1], _pairs(chunks.k, half)[:, :, 0]
        (before, since), until = _pairs(chunks.since, half).unbind(2), _pairs(chunks.until, half)[:, :, 0]
        yield _Level(half, queries * since, keys * until, since, until)
        until *= since[:, :, -1:]
        since *= before[:, :, -1:]
        half *= 2


def _pairs(x: Tensor, half: int) -> Tensor:
    """(M, C, c) -> (M, N, 2, b, c), a view."""
    return x.view(x.shape[0], x.shape[1] // (2 * half), 2, half, x.shape[2])


def _own_scores(chunks: _Chunks) -> Tensor:
    """(M, C, C) with the scores of each query with its own key, which do not decay."""
    return torch.diag_embed((chunks.q * chunks.k).sum(-1))


def _between(scores: Tensor, half: int) -> Tensor:
    """View (M, N, b, b) of ``scores`` (M, C, C): queries of each second half with keys of the first half before it."""
    chunks, size, _ = scores.shape
    pairs = size // (2 * half)
    halves = scores.view(chunks, pairs, 2, half, pairs, 2, half)[:, :, 1, :, :, 0]
    return halves.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _carried(chunks: _Chunks, sums: Tensor) -> Tensor:
    """The sums before each chunk (R, H, g, f, e); updates ``sums`` (R, H, f, e) from before to after all chunks."""
    added = ((chunks.k * chunks.until).transpose(1, 2) @ chunks.v).unflatten(0, chunks.total.shape[:3])
    before = torch.empty_like(added)
    for own, total, further in zip(before.unbind(2), chunks.total.unbind(2), added.unbind(2)):
        own.copy_(sums)
        sums.mul_(total).add_(further)
    return before


def _write(result: Tensor, whole: Tensor, block: _Block) -> None:
    """Write (M, C, c) to the block's place in ``whole`` (B, H, n, c), without the filling of the last chunk."""
    part = whole[block]
    batch, heads, tokens, channels = part.shape
    part.copy_(result.view(batch, heads, -1, channels)[:, :, :tokens])


def _backward(
    inputs: tuple[Tensor, ...],
    size: int,
    blocks: list[_Block],
    before: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_last: Tensor,
) -> list[Tensor]:
    """Gradients of q, k, v, log_decay and the initial sum."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    grad_sum = grad_last.clone(memory_format=torch.contiguous_format)
    for block, sums in zip(reversed(blocks), reversed(before)):
        grad = split_chunks(grad_out[block], size).flatten(0, 2).contiguous()
        results = _backward_block(_chunks(*inputs, block, size), sums.clone(), grad, grad_sum[block.rows])
        for result, whole in zip(results, grads):
            _write(result, whole, block)
    return [*grads, grad_sum]


def _backward_block(chunks: _Chunks, sums: Tensor, grad: Tensor, grad_sum: Tensor) -> tuple[Tensor, ...]:
    """Gradients (M, C, c) of q, k, v and log_decay from ``grad`` (M, C, e).

    ``sums`` are the sums before the block. ``grad_sum`` is the gradient of the sums after the block, and is updated to
    that of the sums before it.
    """
    q, k, v, since, until, total = chunks
    grad_scores, scores = grad @ v.transpose(1, 2), _own_scores(chunks)
    own = grad_scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_q, grad_k = own * k, own * q
    grad_logs = []  # of the sums of ``log_decay`` between the border and the queries and keys of each level
    for level in _levels(chunks):
        _between(scores, level.half).copy_(level.queries @ level.keys.transpose(-2, -1))
        between = _between(grad_scores, level.half).contiguous()
        grad_queries, grad_keys = between @ level.keys, between.transpose(-2, -1) @ level.queries
        grad_logs.append((grad_queries * level.queries, grad_keys * level.keys))
        _pairs(grad_q, level.half)[:, :, 1].addcmul_(grad_queries, level.since)
        _pairs(grad_k, level.half)[:, :, 0].addcmul_(grad_keys, level.until)
    read, added = q * since, k * until
    before = _carried(chunks, sums)  # (R, H, g, f, e)
    after = _carried_back(read.transpose(1, 2) @ grad, total, grad_sum)
    grad_read, grad_added = grad @ before.flatten(0, 2).transpose(1, 2), v @ after.flatten(0, 2).transpose(1, 2)
    grad_q.addcmul_(grad_read, since)
    grad_k.addcmul_(grad_added, until)
    grad_v = (scores.transpose(1, 2) @ grad).baddbmm_(added, after.flatten(0, 2))
    grad_since, grad_until = grad_read.mul_(read), grad_added.mul_(added)
    grad_since[:, -1] += ((before * after).sum(-1) * total.squeeze(-1)).flatten(0, 2)
    return grad_q, grad_k, grad_v, _grad_log_decay(grad_since, grad_until, grad_logs)


def _carried_back(grad_read: Tensor, total: Tensor, grad_sum: Tensor) -> Tensor:
    """The gradients of the sums after each chunk (R, H, g, f, e), from those through the chunks' queries (M, f, e).

    ``grad_sum`` (R, H, f, e) is updated from the gradient of the sum after all chunks to that of the sum before them.
    """
    grad_read = grad_read.unflatten(0, total.shape[:3])
    after = torch.empty_like(grad_read)
    for own, decay, further in reversed([*zip(after.unbind(2), total.unbind(2), grad_read.unbind(2))]):
        own.copy_(grad_sum)
        grad_sum.mul_(decay).add_(further)
    return after


def _grad_log_decay(grad_since: Tensor, grad_until: Tensor, of_levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of ``log_decay`` (M, C, f), from those of its sums between a token and its chunk's start and end.

    From a chunk down to single tokens: a sum that reaches across the first half of a pair is the sum within the second
    half plus that over the whole first half; nothing is subtracted. ``of_levels`` is added level by level. Both tensors
    are changed.
    """
    for level in reversed(range(len(of_levels))):
        (since_first, since_second), (until_first, _) = (
            _pairs(x, 2**level).unbind(2) for x in (grad_since, grad_until)
        )
        since_first[:, :, -1] += since_second.sum(2)
        since_second[:, :, -1] += until_first.sum(2)
        since_second += of_levels[level][0]
        until_first += of_levels[level][1]
    return grad_since
