"""Local attention over chunks that overlap, and attention to their summaries, in addition to ``sequence``.

FLASH, ICML 2022, section 3.2.1 and Appendix A, which name both and prefer the model without; ``README.md`` has the
formulas.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import chunk_count, chunk_length, split_chunks
from ..shared.score_kernels import score_kernel
from .sequence import MixedChunkOptions, Tokens, attend_in_graph


def attend_with_extra_terms(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """All terms of a sequence whose real tokens come first, in differentiable PyTorch functions: (B, H, n, e)."""
    n = tokens.v.shape[2]
    real = torch.full((1,), n, device=tokens.v.device) if padding_mask is None else (~padding_mask).sum(1)
    out = torch.zeros_like(tokens.v)
    plain = options._replace(local=options.local and not options.overlap)
    if plain.local or plain.linear:
        out = attend_in_graph(tokens, None if options.overlap else bias, plain, padding_mask)
    if options.overlap:
        out = out + _overlapping(tokens, bias, options, real)
    return out + _summaries(tokens, options, real) if options.chunk_summaries else out


def _overlapping(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, real: Tensor) -> Tensor:
    """The quadratic term over a chunk and its neighbours: (B, H, n, e); O(n C (s + e))."""
    n, s = tokens.q_quad.shape[2:]
    size, sides = chunk_length(options.chunk_size, n), 1 if options.causal else 2
    queries = split_chunks(tokens.q_quad, size)
    keys, values = (_with_neighbours(split_chunks(x, size), sides) for x in (tokens.k_quad, tokens.v))
    by = math.sqrt(s) if options.kernel == "softmax" else float((1 + sides) * options.chunk_size)
    scores = (queries / by) @ keys.transpose(-2, -1)  # (B, H, G, C, 2C or 3C)
    slot = torch.arange(size, device=real.device)
    offset = torch.arange(keys.shape[3], device=real.device) - size  # of a key, from the first token of the chunk
    if bias is not None:
        scores = scores + _bias_at(bias, slot[:, None] - offset + 2 * options.chunk_size - 1)
    position = torch.arange(queries.shape[2], device=real.device)[:, None] * size + offset  # (G, 2C or 3C)
    hidden = ((position < 0) | (position >= real[:, None, None]))[:, None, :, None, :]  # (B, 1, G, 1, 2C or 3C)
    if options.causal:
        hidden = hidden | (offset > slot[:, None])
    return (score_kernel(scores, options.kernel, hidden) @ values).flatten(2, 3)[:, :, :n]


def _bias_at(bias: Tensor, entries: Tensor) -> Tensor:
    """``bias`` over distances (2N-1,) or (H, 2N-1) at ``entries`` (C, m): (C, m) or (H, 1, C, m)."""
    rows = bias[..., entries]
    return rows.unsqueeze(1) if rows.dim() == 3 else rows


def _with_neighbours(chunks: Tensor, sides: int) -> Tensor:
    """Each chunk of (B, H, G, C, c) after the one before it and, for two sides, before the next: (B, H, G, 2C, c)."""
    before = F.pad(chunks, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    after = [F.pad(chunks, (0, 0, 0, 0, 0, 1))[:, :, 1:]] if sides == 2 else []
    return torch.cat([before, chunks, *after], dim=3)


def _summaries(tokens: Tokens, options: MixedChunkOptions, real: Tensor) -> Tensor:
    """Softmax attention to the mean key and value of each chunk: (B, H, n, e); O(n (n / C) (s + e))."""
    n, s = tokens.q_quad.shape[2:]
    size = chunk_length(options.chunk_size, n)
    groups = torch.arange(chunk_count(n, size), device=real.device)
    count = (real[:, None] - groups * size).clamp(0, size)  # (B, G): real tokens of each chunk
    divisor = count.clamp(min=1).to(tokens.v.dtype)[:, None, :, None]
    keys, values = (split_chunks(x, size).sum(3) / divisor for x in (tokens.k_quad, tokens.v))  # (B, H, G, c)
    hidden = (count == 0)[:, None, None]  # (B, 1, 1, G)
    if options.causal:
        own = torch.arange(n, device=real.device)[:, None] // size
        hidden = hidden | (groups >= own)
    scores = (tokens.q_quad / math.sqrt(s)) @ keys.transpose(-2, -1)  # (B, H, n, G)
    return score_kernel(scores, "softmax", hidden.expand(scores.shape[0], -1, n, -1)) @ values
