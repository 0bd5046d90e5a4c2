"""The gated delta rule over one block of as many chunks as fit a CPU's cache; ``README.md`` derives it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .causal import Chunks, decays

#: Numbers of q in a block: on a CPU so that a block's tensors fit its cache, elsewhere limited only by memory.
_CACHED_NUMBERS, _MOST_NUMBERS = 2**17, 2**24


class Block(NamedTuple):
    """Intermediate tensors of a block of G chunks, whose ``Chunks`` are (G, N, C, ...)."""

    inside: Tensor  # (G, N, C, C), decay from key to query
    since_start: Tensor  # (G, N, C), decay from the start of a chunk
    keys_at_end: Tensor  # (G, N, C, d), decayed until the end of a chunk
    seen: Tensor  # (G, N, C, C), decayed products of each key with those before it
    inverse: Tensor  # (G, N, C, C), of I + seen times beta
    read: Tensor  # (G, N, C, d), W: errors are E0 - W S
    errors: Tensor  # (G, N, C, e), the error of each token
    states: Tensor  # (1 + G, N, d, e), before each chunk and after the last


def block_forward(chunks: Chunks, state: Tensor) -> Block:
    """The block of ``chunks`` after ``state`` (N, d, e); O(G N C (C (C + d + e) + d e))."""
    inside, since_start, until_end = decays(chunks)
    beta = chunks.beta.unsqueeze(-1)
    seen = (chunks.k @ chunks.k.transpose(-2, -1)).mul_(inside).tril_(-1)
    identity = torch.eye(seen.shape[-1], dtype=seen.dtype, device=seen.device).expand_as(seen)
    inverse = torch.linalg.solve_triangular(seen * beta.transpose(-2, -1), identity, upper=False, unitriangular=True)
    read = inverse @ (chunks.k * since_start.unsqueeze(-1))
    keys_at_end = chunks.k * until_end.unsqueeze(-1)
    written = (keys_at_end * beta).transpose(-2, -1)  # (G, N, d, C)
    errors, kept = inverse @ chunks.v, since_start[..., -1:, None]  # (G, N, 1, 1)
    states = state.new_empty(1 + len(errors), *state.shape)
    states[0] = state
    for g, error in enumerate(errors):
        error.baddbmm_(read[g], states[g], alpha=-1)
        torch.mul(states[g], kept[g], out=states[g + 1]).baddbmm_(written[g], error)
    return Block(inside, since_start, keys_at_end, seen, inverse, read, errors, states)


def block_outputs(chunks: Chunks, block: Block) -> Tensor:
    """Outputs that the queries of a block read, (G, N, C, e)."""
    scores = (chunks.q @ chunks.k.transpose(-2, -1)).mul_(block.inside)
    out = (chunks.q * block.since_start.unsqueeze(-1)) @ block.states[:-1]
    out.flatten(0, 1).baddbmm_(scores.flatten(0, 1), (block.errors * chunks.beta.unsqueeze(-1)).flatten(0, 1))
    return out


def blocks_of(q: Tensor, size: int) -> list[slice]:
    """The tokens of each block, for q (B, H, n, d): whole chunks of ``size`` tokens, but for the last."""
    most = _CACHED_NUMBERS if q.device.type == "cpu" else _MOST_NUMBERS
    tokens = size * max(1, most // max(1, size * q.shape[:2].numel() * q.shape[3]))
    return [slice(begin, begin + tokens) for begin in range(0, q.shape[2], tokens)]


def cut(tensors: Sequence[Tensor | None], tokens: slice, size: int) -> Iterator[Tensor | None]:
    """Some tokens of each (B, H, n, ...) as chunks (G, N, C, ...), zeros appended to fill the last."""
    for x in tensors:
        if x is None:
            yield None
            continue
        x = x[:, :, tokens].flatten(0, 1)  # (N, tokens, ...)
        missing = -x.shape[1] % size
        if missing:
            x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
        yield x.unflatten(1, (-1, size)).transpose(0, 1).contiguous()


def put(whole: Tensor, tokens: slice, chunks: Tensor) -> None:
    """The inverse of ``cut``: write ``chunks`` (G, N, C, ...) to some tokens of ``whole`` (B, H, n, ...)."""
    target = whole[:, :, tokens]
    target.copy_(chunks.transpose(0, 1).flatten(1, 2)[:, : target.shape[2]].view_as(target))
