"""One piece of causal mixed chunk attention with relu², forward and backward, without a graph.

A piece is so many chunks as stay in a CPU's caches. The backward pass computes its scores again, so that all that is
kept is what came in and the sums before each chunk; both leave out blocks of scores above the diagonal. The kernel is
relu², because a row of it needs no other row's and no maximum.
"""

from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .chunks import carry_sums, split_chunks

# Tokens that go through at once on a CPU; from 256 to 2048 of them are equally fast to 4 % at 8192 tokens.
_PIECE = 1024
# Queries whose scores are computed at once: more of them compute more scores that are hidden; 128 and 256 are slower.
_BLOCK_ROWS = 64


class Tokens(NamedTuple):
    """The five inputs, each (B, H, n, s) but v, (B, H, n, e); in chunks (B, H, G, C, s) and (B, H, G, C, e)."""

    q_quad: Tensor
    k_quad: Tensor
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor


class Piece(NamedTuple):
    """Some rows of a batch, some of their tokens, and the chunks these are."""

    rows: slice
    tokens: slice
    chunks: slice


def pieces(batch: int, tokens: int, size: int) -> Iterator[Piece]:
    """``batch`` rows of ``tokens`` tokens in chunks of ``size``, a row from its first token on."""
    rows = max(1, _PIECE // tokens)
    step = max(1, _PIECE // size) * size
    for row in range(0, batch, rows):
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            yield Piece(slice(row, row + rows), slice(start, stop), slice(start // size, -(-stop // size)))


def flat_chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, n, c) -> (B H G, C, c), zeros appended to fill the last chunk."""
    return split_chunks(x, size).flatten(0, 2)


def forward_piece(
    chunks: Tokens, earlier: Tensor, bias: Optional[Tensor], divisor: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """Both terms of some chunks: (B H G, C, e), and Σ k_lin vᵀ before each (B, H, G, s, e) and behind all (B, H, s, e).

    chunks (B H G, C, c) as ``flat_chunks`` gives them; ``earlier`` (B, H, s, e) is the sum before the first; ``bias``
    (1 or H, C, C) or None. O(n (C (s + e) + s e)) time.
    """
    batch, heads = earlier.shape[:2]
    added = (chunks.k_lin.transpose(-2, -1) @ chunks.v).unflatten(0, (batch, heads, -1))  # (B, H, G, s, e)
    sums, total = carry_sums(added, earlier)
    out = torch.bmm(chunks.q_lin, sums.flatten(0, 2)).div_(divisor)  # (B H G, C, e)
    bias = _bias_of_chunks(bias, sums)
    for rows, keys in _blocks(out.shape[1]):
        weights = _root_weights(chunks, rows, keys, bias, divisor).square_()
        out[:, rows].baddbmm_(weights, chunks.v[:, keys])
    return out, sums, total


def backward_piece(
    chunks: Tokens,
    sums: Tensor,
    later: Tensor,
    bias: Optional[Tensor],
    bias_gradient: Optional[Tensor],
    divisor: float,
    gradient: Tensor,
) -> Tuple[List[Tensor], Tensor]:
    """Gradients of the chunks (B H G, C, c) and of ``earlier``, from that of ``forward_piece``'s output (B H G, C, e).

    ``sums`` (B, H, G, s, e) are those of the forward pass; ``later`` (B, H, s, e) is the gradient of the sum behind the
    last chunk; ``bias_gradient`` (1 or H, C, C) takes in what belongs to the bias.
    """
    across = torch.bmm(chunks.q_lin.transpose(-2, -1), gradient).div_(divisor).view_as(sums)  # (B, H, G, s, e)
    behind, total = carry_sums(across, later, reverse=True)
    behind = behind.flatten(0, 2)  # (B H G, s, e)
    q_lin = torch.bmm(gradient, sums.flatten(0, 2).transpose(-2, -1)).div_(divisor)
    k_lin = torch.bmm(chunks.v, behind.transpose(-2, -1))
    v = torch.bmm(chunks.k_lin, behind)
    q_quad, k_quad = torch.empty_like(chunks.q_quad), torch.zeros_like(chunks.k_quad)
    bias = _bias_of_chunks(bias, sums)
    for rows, keys in _blocks(gradient.shape[1]):
        # The weights are r², r = relu(scores), so a score's gradient is twice this:
        roots = _root_weights(chunks, rows, keys, bias, divisor)
        scores = torch.bmm(gradient[:, rows], chunks.v[:, keys].transpose(-2, -1)).mul_(roots)
        v[:, keys].baddbmm_(roots.square_().transpose(-2, -1), gradient[:, rows])
        q_quad[:, rows] = torch.bmm(scores, chunks.k_quad[:, keys])
        k_quad[:, keys].baddbmm_(scores.transpose(-2, -1), chunks.q_quad[:, rows])
        if bias_gradient is not None:
            of_heads = scores.unflatten(0, sums.shape[:3]).sum((0, 2))  # (H, rows, keys)
            bias_gradient[:, rows, keys].add_(of_heads.sum_to_size(len(bias_gradient), *of_heads.shape[1:]), alpha=2.0)
    return [q_quad.mul_(2.0 / divisor), k_quad.mul_(2.0 / divisor), q_lin, k_lin, v], total


def _blocks(size: int) -> Iterator[Tuple[slice, slice]]:
    """Rows of a chunk that are computed together, and the keys that the last of them sees."""
    for start in range(0, size, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, size)
        yield slice(start, stop), slice(0, stop)


def _bias_of_chunks(bias: Optional[Tensor], sums: Tensor) -> Optional[Tensor]:
    """(1 or H, C, C) for sums (B, H, G, s, e) -> (B H G, C, C), not a copy where all chunks share it."""
    if bias is None:
        return None
    return bias.unsqueeze(1).expand(*sums.shape[:3], -1, -1).flatten(0, 2)


def _root_weights(chunks: Tokens, rows: slice, keys: slice, bias: Optional[Tensor], divisor: float) -> Tensor:
    """relu(q_quad·k_quad / divisor + bias), 0 above the diagonal: (B H G, rows, keys), a new tensor."""
    q, k = chunks.q_quad[:, rows], chunks.k_quad[:, keys].transpose(-2, -1)
    if bias is None:
        roots = torch.bmm(q, k).div_(divisor)
    else:
        roots = torch.baddbmm(bias[:, rows, keys], q, k, alpha=1.0 / divisor)
    roots[:, :, rows].tril_()  # of the keys, these stand where the queries do
    return roots.relu_()
