"""Mixed chunk attention of a whole sequence in plain PyTorch, and the types that every implementation shares."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.checks import ArgumentError, check_choice, check_positive_int
from ..shared.chunks import carry_sums, chunk_length, split_chunks
from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.precision import compute_dtype, in_dtype
from ..shared.relative_bias import bias_rows
from ..shared.score_kernels import SCORE_KERNELS, score_kernel


class Tokens(NamedTuple):
    """The five inputs, (B, H, n, s) or, for v, (B, H, n, e); in chunks (B, H, G, C, s) and (B, H, G, C, e)."""

    q_quad: Tensor
    k_quad: Tensor
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor


class MixedChunkOptions(NamedTuple):
    """The options of ``mixed_chunk_attention``, which describes them. Only ``checked`` validates their values."""

    chunk_size: int
    causal: bool = False
    kernel: str = "relu2"
    local: bool = True
    linear: bool = True
    first_softmax: bool = False
    first_to_all: bool = False
    overlap: bool = False
    chunk_summaries: bool = False

    def checked(self) -> "MixedChunkOptions":
        """Return the options unchanged; ValueError names an option that is not allowed or does not fit the others."""
        check_choice("kernel", self.kernel, SCORE_KERNELS)
        check_positive_int("chunk_size", self.chunk_size)
        if not self.local and not self.linear:
            raise ValueError("local and linear are both False; allowed: one of them, or both")
        for name in ("first_softmax", "first_to_all"):
            if getattr(self, name) and (self.causal or not self.local):
                options = f"causal={self.causal} and local={self.local}"
                raise ValueError(f"{name} is True with {options}; allowed: only with causal=False and local=True")
        for name in ("local", "first_softmax", "first_to_all"):
            value = getattr(self, name)
            if self.overlap and value != (name == "local"):
                raise ArgumentError(f"`overlap=True` is given; allowed: without `{name}={value}`")
        return self

    def has_extra_terms(self) -> bool:
        """Whether there are terms in addition to the local and the linear one; see ``extra_terms``."""
        return self.overlap or self.chunk_summaries

    def bias_reach(self) -> int:
        """The number of tokens that a bias by distance covers: C, or 2C if chunks overlap."""
        return 2 * self.chunk_size if self.overlap else self.chunk_size


def prepare(tokens: Tokens, bias: Tensor | None, padding_mask: Tensor | None) -> tuple[Tokens, Tensor | None]:
    """Inputs and bias in the dtype for sums, padding cleared: a NaN there would pass any mask, since 0 * NaN is NaN."""
    dtype = compute_dtype(tokens.v)
    tokens = Tokens(*(zero_padding(in_dtype(x, dtype), padding_mask) for x in tokens))
    return tokens, None if bias is None else bias.to(dtype)


def attend_in_graph(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """A sequence whose real tokens come first, in differentiable PyTorch functions: (B, H, n, e)."""
    n = tokens.v.shape[2]
    real = None if padding_mask is None else (~padding_mask).sum(1)  # (B,)
    chunks = split(tokens, chunk_length(options.chunk_size, n))
    linear = None
    if options.linear and options.causal:
        linear, _ = carry_sums(chunk_sums(chunks), None)  # (B, H, G, s, e)
    elif options.linear:
        count = n if real is None else real.clamp(min=1).to(tokens.v.dtype)[:, None, None, None]
        linear = (tokens.k_lin.transpose(-2, -1) @ tokens.v / count).unsqueeze(2)  # (B, H, 1, s, e)
    hidden = hidden_keys(chunks, options, n, real)
    return both_terms(chunks, linear, bias, options, hidden, tokens, real)[:, :, :n]


def whole_sequence(
    tokens: Tokens,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    attend: Callable[..., Tensor] = attend_in_graph,
) -> Tensor:
    """The outputs (B, H, n, e) of a whole sequence with padding on any side, in the dtype for sums.

    ``attend`` gets real tokens first.
    """
    tokens, bias = prepare(tokens, bias, padding_mask)
    order = real_first(padding_mask)
    tokens = Tokens(*(take(x, order) for x in tokens))
    return put_back(attend(tokens, bias, options, padding_mask), order)


def split(tokens: Tokens, chunk_size: int) -> Tokens:
    """(B, H, n, c) -> (B, H, G, C, c) each."""
    return Tokens(*(split_chunks(x, chunk_size) for x in tokens))


def chunk_sums(chunks: Tokens) -> Tensor:
    """Σ k_lin vᵀ of each chunk, (B, H, G, s, e)."""
    return chunks.k_lin.transpose(-2, -1) @ chunks.v


def score_divisor(options: MixedChunkOptions, s: int) -> float:
    """The divisor of scores inside a chunk: C, also for a chunk that is not full, or √s for softmax."""
    return math.sqrt(s) if options.kernel == "softmax" else float(options.chunk_size)


def hidden_keys(chunks: Tokens, options: MixedChunkOptions, n: int, real: Tensor | None) -> Tensor | None:
    """Mask of the keys that a chunk's queries must not see: (C, C) if causal, else (B, 1, G, 1, C), or None."""
    groups, size = chunks.v.shape[2:4]
    slot = torch.arange(size, device=chunks.v.device)
    if options.causal:
        return slot > slot[:, None]
    if real is None and groups * size == n:
        return None
    position = torch.arange(groups * size, device=chunks.v.device).view(groups, size)
    end = real[:, None, None] if real is not None else torch.full((1, 1, 1), n, device=chunks.v.device)
    return (position >= end)[:, None, :, None, :]


def both_terms(
    chunks: Tokens,
    linear: Tensor | None,
    bias: Tensor | None,
    options: MixedChunkOptions,
    hidden: Tensor | None,
    tokens: Tokens,
    real: Tensor | None,
) -> Tensor:
    """The local and the linear term of every chunk: (B, H, G C, e).

    ``linear``: Σ k_lin vᵀ over the tokens that a chunk sees across chunks, (B, H, G or 1, s, e); None without the term.
    ``real``: number of real tokens of each row (B,), None for all; only ``first_to_all`` uses this and ``tokens``.
    """
    out = None
    if options.local:
        out = _local_term(chunks, bias, options, hidden)
        if options.first_to_all:
            out = _replace_first(out, _first_to_all(chunks, tokens, real))
    if linear is not None:
        # Causal sums are not divided yet. The divisor is C even if n < C, because it is a constant of the model.
        q_lin = chunks.q_lin / options.chunk_size if options.causal else chunks.q_lin
        across = q_lin @ linear
        out = across if out is None else out + across
    return out.flatten(2, 3)  # (B, H, G, C, e) -> (B, H, G C, e)


def _local_term(chunks: Tokens, bias: Tensor | None, options: MixedChunkOptions, hidden: Tensor | None) -> Tensor:
    """The quadratic term inside each chunk, (B, H, G, C, e)."""
    size, s = chunks.q_quad.shape[3:]
    scores = (chunks.q_quad / score_divisor(options, s)) @ chunks.k_quad.transpose(-2, -1)  # (B, H, G, C, C)
    if bias is not None:
        bias = bias_rows(bias, options.chunk_size, 0, size, size)  # (C, C) or (H, C, C)
        bias = bias.unsqueeze(1) if bias.dim() == 3 else bias
        scores = scores + bias
    out = score_kernel(scores, options.kernel, hidden) @ chunks.v
    if options.first_softmax and not options.first_to_all and options.kernel != "softmax":
        first = (chunks.q_quad[:, :, :1, :1] / math.sqrt(s)) @ chunks.k_quad[:, :, :1].transpose(-2, -1)
        first = first if bias is None else first + bias[..., :1, :]
        weights = score_kernel(first, "softmax", None if hidden is None else hidden[:, :, :1])  # (B, H, 1, 1, C)
        first_chunk = _replace_first(out[:, :, :1], (weights @ chunks.v[:, :, :1]).squeeze(3))
        out = torch.cat([first_chunk, out[:, :, 1:]], dim=2)
    return out


def _replace_first(out: Tensor, first: Tensor) -> Tensor:
    """``out`` (B, H, G, C, e) with ``first`` (B, H, G, e) as each chunk's first row."""
    return torch.cat([first.unsqueeze(3), out[:, :, :, 1:]], dim=3)


def _first_to_all(chunks: Tokens, tokens: Tokens, real: Tensor | None) -> Tensor:
    """Softmax attention of each chunk's first token to the whole sequence: (B, H, G, e)."""
    first = chunks.q_quad[:, :, :, 0] / math.sqrt(chunks.q_quad.shape[4])  # (B, H, G, s)
    scores = first @ tokens.k_quad.transpose(-2, -1)  # (B, H, G, n)
    hidden = None
    if real is not None:
        position = torch.arange(tokens.v.shape[2], device=real.device)
        hidden = (position >= real[:, None])[:, None, None, :]  # (B, 1, 1, n)
    return score_kernel(scores, "softmax", hidden) @ tokens.v
