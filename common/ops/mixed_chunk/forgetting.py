"""Sums of causal mixed chunk attention that decay, in plain PyTorch.

The sum Σ k_lin vᵀ over earlier chunks is multiplied by exp(log_decay_t) at each token t, as a running sum is: so a key
of an earlier chunk counts exp(Σ log_decay_t) over the tokens t after it up to the query. The quadratic term, inside a
chunk, forgets nothing. Gates are (B, H, n), by head, or (B, H, n, s), by channel of k_lin.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import ArgumentError
from ..shared.chunks import carry_decayed_sums, carry_sums, chunk_length, reverse_cumsum, split_chunks
from ..shared.padding import put_back, real_first, take
from ..shared.state import State
from .sequence import MixedChunkOptions, Tokens, both_terms, chunk_sums, hidden_keys, split


def check_terms(options: MixedChunkOptions) -> None:
    """Raise ValueError for options that do not support a decaying sum."""
    if not options.linear:
        raise ArgumentError("`log_decay` is given; allowed: only with linear=True, whose sum forgets")
    for name in ("overlap", "chunk_summaries"):
        if getattr(options, name):
            raise ArgumentError(f"`log_decay` is given; allowed: without {name}=True")


def whole_sequence(
    tokens: Tokens, log_decay: Tensor, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """A whole sequence with padding on any side, all in the dtype of sums, 0 at padding: (B, H, n, e)."""
    order = real_first(padding_mask)
    tokens, gates = Tokens(*(take(x, order) for x in tokens)), take(by_channel(log_decay), order)
    size, n = chunk_length(options.chunk_size, tokens.v.shape[2]), tokens.v.shape[2]
    chunks, sums = sums_of_chunks(tokens, gates, None, size)
    out = both_terms(chunks, sums.before, bias, options, hidden_keys(chunks, options, n, None), tokens, None)
    return put_back(out[:, :, :n], order)


class Sums(NamedTuple):
    """Sums of every chunk and their decay, (B, H, G, s, e) unless another shape is stated."""

    own: Tensor  # Σ k_lin vᵀ of its tokens, decayed to its end
    before: Tensor  # of the tokens before it, decayed to its start
    decay: Tensor | None  # what it leaves of the latter, (B, H, G, 1 or s, 1); None without gates


def by_channel(log_decay: Tensor) -> Tensor:
    """(B, H, n) -> (B, H, n, 1); gates by channel unchanged."""
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay


def sums_of_chunks(tokens: Tokens, gates: Tensor | None, state: State | None, size: int) -> tuple[Tokens, Sums]:
    """Chunks whose queries of the linear term have decayed since their chunk began, and the sums of each.

    The first chunk continues the chunk of ``state``. ``gates`` (B, H, n, 1 or s), None if nothing decays.
    """
    chunks, decay, initial = split(tokens, size), None, None if state is None else state["sum_kv"]
    if gates is None:
        own = chunk_sums(chunks)
    else:
        gates = split_chunks(gates, size)  # (B, H, G, C, 1 or s)
        # Over the tokens after a key, so that nothing is subtracted.
        after = F.pad(reverse_cumsum(gates.transpose(3, 4))[..., 1:], (0, 1)).transpose(3, 4)
        own = (chunks.k_lin * after.exp()).transpose(-2, -1) @ chunks.v
        of_chunk = gates.sum(3)
        decay = of_chunk.exp().unsqueeze(-1)
        q_quad, k_quad, q_lin, k_lin, v = chunks
        chunks = Tokens(q_quad, k_quad, q_lin * gates.cumsum(3).exp(), k_lin, v)
    if state is not None:
        before = state["own_kv"] if decay is None else decay[:, :, 0] * state["own_kv"]
        own = torch.cat([(own[:, :, 0] + before).unsqueeze(2), own[:, :, 1:]], dim=2)
    if gates is None:
        return chunks, Sums(own, carry_sums(own, initial)[0], None)
    of_chunk = of_chunk.squeeze(3) if of_chunk.shape[3] == 1 else of_chunk
    return chunks, Sums(own, carry_decayed_sums(own, initial, of_chunk)[0], decay)
