"""Causal mixed chunk attention with relu² in blocks that fit a CPU's caches, with a hand-written backward pass.

A block is some chunks of some rows of the batch. The backward pass recomputes its scores, so that only the inputs and
the sums before each chunk are kept; both passes skip scores above the diagonal, in bands of rows. The
kernel is relu², because its weights need no other score of their row, and no maximum.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.autograd import graph_gradients
from ..shared.chunks import carry_sums, split_chunks
from ..shared.precision import autocast_off
from ..shared.relative_bias import bias_matrix
from ..shared.tracing import runs_eagerly
from .sequence import MixedChunkOptions, Tokens, attend_in_graph

#: Tokens of a block; from 256 to 2048 of them are equally fast to 4 % at 8192 tokens.
BLOCK_TOKENS = 1024
#: Queries of a band, whose scores are computed at once. More of them compute more hidden scores: 128, 256 are slower.
BAND_ROWS = 64


class _Block(NamedTuple):
    """Some rows of a batch, some of their tokens, and the chunks of these."""

    rows: slice
    tokens: slice
    chunks: slice


def applies(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions) -> bool:
    """Whether this is the paper's language model on a CPU: causal, both terms, relu², and nothing traces operations."""
    paper = options.causal and options.local and options.linear and options.kernel == "relu2"
    tensors = tokens if bias is None else (*tokens, bias)
    return paper and tokens.v.device.type == "cpu" and runs_eagerly(*tensors)


def causal_attention_in_blocks(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """Both terms, (B, H, n, e); float32 or float64. Padding comes after the real tokens and is zero.

    O(n (C (s + e) + s e)) time; in addition to inputs, output and their gradients, O(n s e / C) memory.
    """
    return _InBlocks.apply(*tokens, bias, options)


class _InBlocks(torch.autograd.Function):
    """Both passes over five tensors and a bias or None; the options have no gradient."""

    @staticmethod
    def forward(ctx: Any, q_quad, k_quad, q_lin, k_lin, v, bias, options: MixedChunkOptions) -> Tensor:
        tokens = Tokens(q_quad, k_quad, q_lin, k_lin, v)
        batch, heads, n, e = v.shape
        size = min(options.chunk_size, n)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        # Before each chunk but the first, where they are 0.
        sums = v.new_empty(batch, heads, -(-n // size) - 1, q_lin.shape[3], e)
        earlier = v.new_zeros(batch, heads, q_lin.shape[3], e)
        matrix = None if bias is None else bias_matrix(bias, options.chunk_size)  # (1 or H, C, C)
        for block in _blocks(batch, n, size):
            rows, chunks = block.rows, _chunks(tokens, block, size)
            result = _room(out, block, size)
            sums_before, earlier[rows] = _forward_block(chunks, earlier[rows], matrix, options.chunk_size, result)
            sums[rows, :, _after_first(block)] = sums_before[:, :, int(block.chunks.start == 0) :]
            _write(out, block, result)
        ctx.save_for_backward(*tokens, bias, sums)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sums = ctx.saved_tensors
        with autocast_off(sums):  # that of the forward pass does not apply here
            if torch.is_grad_enabled() or not runs_eagerly(grad_out):

                def attend(*inputs: Tensor | None) -> Tensor:
                    return attend_in_graph(Tokens(*inputs[:5]), inputs[5], ctx.options, None)

                grads = graph_gradients(attend, inputs, (grad_out,))
            else:
                needs_bias = ctx.needs_input_grad[5]
                grads = _backward(Tokens(*inputs[:5]), inputs[5], sums, ctx.options.chunk_size, grad_out, needs_bias)
        return (*grads, None)


def _backward(
    tokens: Tokens, bias: Tensor | None, sums: Tensor, chunk_size: int, grad_out: Tensor, needs_bias: bool
) -> list[Tensor | None]:
    """Gradients of the five tensors and, if ``needs_bias``, of the bias."""
    batch, _, n, _ = tokens.v.shape
    size = min(chunk_size, n)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
    grad_sum_after = sums.new_zeros(*sums.shape[:2], *sums.shape[3:])
    with torch.set_grad_enabled(needs_bias):
        leaf = None if bias is None else bias.detach().requires_grad_(needs_bias)
        matrix = None if bias is None else bias_matrix(leaf, chunk_size)  # (1 or H, C, C)
    grad_matrix = torch.zeros_like(matrix) if needs_bias else None
    for block in reversed(list(_blocks(batch, n, size))):
        rows, chunks = block.rows, _chunks(tokens, block, size)
        grad_block = _flat_chunks(grad_out[rows, :, block.tokens], size)
        results = [_room(grad, block, size) for grad in grads]
        grad_sum_after[rows] = _backward_block(
            chunks,
            sums[rows, :, _after_first(block)],
            grad_sum_after[rows],
            matrix,
            grad_matrix,
            chunk_size,
            grad_block,
            results,
        )
        for grad, result in zip(grads, results):
            _write(grad, block, result)
    return [*grads, torch.autograd.grad(matrix, leaf, grad_matrix)[0] if needs_bias else None]


def _blocks(batch: int, tokens: int, size: int) -> Iterator[_Block]:
    """``batch`` rows of ``tokens`` tokens in chunks of ``size``, each row from its first token on."""
    rows = max(1, BLOCK_TOKENS // tokens)
    step = max(1, BLOCK_TOKENS // size) * size
    for row in range(0, batch, rows):
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            yield _Block(slice(row, row + rows), slice(start, stop), slice(start // size, -(-stop // size)))


def _chunks(tokens: Tokens, block: _Block, size: int) -> Tokens:
    """The tokens of ``block`` in chunks of ``size``: (B H G, C, c) each."""
    return Tokens(*(_flat_chunks(x[block.rows, :, block.tokens], size) for x in tokens))


def _flat_chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, n, c) -> (B H G, C, c), zeros appended to fill the last chunk."""
    return split_chunks(x, size).flatten(0, 2)


def _after_first(block: _Block) -> slice:
    """The chunks of ``block`` among all but the first of the sequence."""
    return slice(max(block.chunks.start - 1, 0), block.chunks.stop - 1)


def _room(out: Tensor, block: _Block, size: int) -> Tensor:
    """Memory for the result that ``_write`` writes to ``out``: a view of it as (B H G, C, c), or new if impossible."""
    batch, heads, n, channels = out[block.rows, :, block.tokens].shape
    if n % size == 0 and (n == out.shape[2] or batch * heads == 1):
        return _flat_chunks(out[block.rows, :, block.tokens], size)
    return out.new_empty(batch * heads * -(-n // size), size, channels)


def _write(out: Tensor, block: _Block, result: Tensor) -> None:
    """Write ``result`` (B H G, C, c) to the place of ``block`` in ``out`` (B, H, n, c), unless it was formed there."""
    target = out[block.rows, :, block.tokens]
    if result.data_ptr() != target.data_ptr():
        target.copy_(result.view(*target.shape[:2], -1, target.shape[3])[:, :, : target.shape[2]])


def _forward_block(
    chunks: Tokens, earlier: Tensor, bias: Tensor | None, divisor: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Write both terms of some chunks to ``out`` (B H G, C, e).

    Returns Σ k_lin vᵀ before each chunk (B, H, G, s, e) and after all (B, H, s, e). chunks (B H G, C, c) as
    ``_flat_chunks`` gives them; ``earlier`` (B, H, s, e) is the sum before the first; ``bias`` (1 or H, C, C) or None.
    O(n (C (s + e) + s e)) time.
    """
    batch, heads = earlier.shape[:2]
    added = (chunks.k_lin.transpose(-2, -1) @ chunks.v).unflatten(0, (batch, heads, -1))  # (B, H, G, s, e)
    sums, total = carry_sums(added, earlier)
    torch.bmm(chunks.q_lin, sums.flatten(0, 2), out=out).div_(divisor)
    bias = _chunk_bias(bias, sums.shape)
    for rows, keys in _bands(out.shape[1]):
        weights = _root_weights(chunks, rows, keys, bias, divisor).square_()
        out[:, rows].baddbmm_(weights, chunks.v[:, keys])
    return sums, total


def _backward_block(
    chunks: Tokens,
    sums: Tensor,
    grad_sum_after: Tensor,
    bias: Tensor | None,
    grad_bias: Tensor | None,
    divisor: float,
    grad_out: Tensor,
    grads: Sequence[Tensor],
) -> Tensor:
    """Write the gradients of the chunks (B H G, C, c) to ``grads``; return that of ``earlier``, as ``_forward_block``.

    ``sums`` (B, H, G, s, e) are those of the forward pass, but for the zeros before the first chunk of a sequence;
    ``grad_sum_after`` (B, H, s, e) is the gradient of the sum after the last chunk; ``grad_out`` (B H G, C, e) that
    of the output; ``grad_bias`` (1 or H, C, C) is added to.
    """
    if sums.shape[:3].numel() < len(grad_out):
        sums = F.pad(sums, (0, 0, 0, 0, 1, 0))  # 0 before the first chunk of the sequence
    grad_q, grad_k, grad_q_lin, grad_k_lin, grad_v = grads
    torch.bmm(grad_out, sums.flatten(0, 2).transpose(-2, -1), out=grad_q_lin).div_(divisor)
    shape = sums.shape
    del sums  # here and below: frees memory before more is allocated
    across = torch.bmm(chunks.q_lin.transpose(-2, -1), grad_out).div_(divisor).view(shape)
    grad_sums, grad_earlier = carry_sums(across, grad_sum_after, reverse=True)
    del across
    grad_sums = grad_sums.flatten(0, 2)  # (B H G, s, e): of the sum after each chunk
    torch.bmm(chunks.v, grad_sums.transpose(-2, -1), out=grad_k_lin)
    torch.bmm(chunks.k_lin, grad_sums, out=grad_v)
    del grad_sums
    grad_k.zero_()
    bias = _chunk_bias(bias, shape)
    for rows, keys in _bands(grad_out.shape[1]):
        # The weights are r², r = relu(score), so the gradient of a score is 2 r times that of its weight. The 2 is
        # multiplied in at the end.
        roots = _root_weights(chunks, rows, keys, bias, divisor)
        half_grad_scores = torch.bmm(grad_out[:, rows], chunks.v[:, keys].transpose(-2, -1)).mul_(roots)
        grad_v[:, keys].baddbmm_(roots.square_().transpose(-2, -1), grad_out[:, rows])
        grad_q[:, rows] = torch.bmm(half_grad_scores, chunks.k_quad[:, keys])
        grad_k[:, keys].baddbmm_(half_grad_scores.transpose(-2, -1), chunks.q_quad[:, rows])
        if grad_bias is not None:
            by_head = half_grad_scores.unflatten(0, shape[:3]).sum((0, 2))  # (H, rows, keys)
            grad_bias[:, rows, keys].add_(by_head.sum_to_size(len(grad_bias), *by_head.shape[1:]), alpha=2.0)
    grad_q.mul_(2.0 / divisor)
    grad_k.mul_(2.0 / divisor)
    return grad_earlier


def _bands(size: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a chunk that are computed together, and the keys that the last of them sees."""
    for start in range(0, size, BAND_ROWS):
        stop = min(start + BAND_ROWS, size)
        yield slice(start, stop), slice(0, stop)


def _chunk_bias(bias: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The bias (1 or H, C, C) of every chunk of sums (B, H, G, s, e): (B H G, C, C), no copy if all share one."""
    if bias is None:
        return None
    return bias.unsqueeze(1).expand(*shape[:3], -1, -1).flatten(0, 2)


def _root_weights(chunks: Tokens, rows: slice, keys: slice, bias: Tensor | None, divisor: float) -> Tensor:
    """relu(q_quad·k_quad / divisor + bias), 0 above the diagonal: (B H G, rows, keys), a new tensor."""
    q, k = chunks.q_quad[:, rows], chunks.k_quad[:, keys].transpose(-2, -1)
    if bias is None:
        roots = torch.bmm(q, k).div_(divisor)
    else:
        roots = torch.baddbmm(bias[:, rows, keys], q, k, alpha=1.0 / divisor)
    roots[:, :, rows].tril_()  # the keys at the positions of the queries; all keys before them are visible
    return roots.relu_()
