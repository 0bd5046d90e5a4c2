"""Causal mixed chunk attention whose linear term decays, in plain PyTorch.

The sum Σ k_lin vᵀ over earlier chunks is multiplied by exp(log_decay_t) at each token t, as a running sum is: so a key
of an earlier chunk counts exp(Σ log_decay_t) over the tokens t after it up to the query. The quadratic term, inside a
chunk, forgets nothing. Gates are (B, H, n), by head, or (B, H, n, s), by channel of k_lin.

The state holds k_quad and v of the current chunk's tokens in at most C slots, s + e channels each, but for those of the
current *block* of at most R tokens, which it holds apart: a step adds to the block, and a full block is moved into the
chunk, since a step that wrote into the chunk would copy all of it. And two sums Σ k_lin vᵀ that have decayed up to the
last token: ``sum_kv`` over the chunks before, without rows before there is one, and ``own_kv`` over the current chunk,
which no query reads before it is full.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import ArgumentError
from ..shared.chunks import carry_decayed_sums, chunk_length, reverse_cumsum, split_chunks
from ..shared.padding import invert, put_back, real_first, take
from ..shared.relative_bias import bias_at
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from . import sizes
from .decoding import attend_at, block_slots, slot_index
from .sequence import MixedChunkOptions, Tokens, both_terms, hidden_keys, score_divisor, split


def check_terms(options: MixedChunkOptions) -> None:
    """Raise ValueError for options that do not support a decaying sum."""
    if not options.linear:
        raise ArgumentError("`log_decay` is given; allowed: only with linear=True, whose sum forgets")
    for name in ("overlap", "chunk_summaries"):
        if getattr(options, name):
            raise ArgumentError(f"`log_decay` is given; allowed: without {name}=True")


def state_shapes(tokens: Tokens, held: sizes.Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state with the sizes ``held``."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, held.sums, e),
        "own_kv": (batch, heads, s, e),
        "chunk": (batch, heads, held.slots, s + e),
        "block": (batch, heads, held.block, s + e),
    }


def whole_sequence(
    tokens: Tokens, log_decay: Tensor, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """A whole sequence with padding on any side, all in the dtype of sums, 0 at padding: (B, H, n, e)."""
    order = real_first(padding_mask)
    tokens, gates = Tokens(*(take(x, order) for x in tokens)), take(_by_channel(log_decay), order)
    size, n = chunk_length(options.chunk_size, tokens.v.shape[2]), tokens.v.shape[2]
    chunks, sums = _decayed_chunks(tokens, gates, None, size)
    out = both_terms(chunks, sums.before, bias, options, hidden_keys(chunks, options, n, None), tokens, None)
    return put_back(out[:, :, :n], order)


def step(
    tokens: Tokens, log_decay: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor, State]:
    """One real token after ``state``: its output (B, H, 1, e) and the next state; O(C (s + e) + s e).

    The next state may share tensors with ``state``.
    """
    decay = _by_channel(log_decay).exp().transpose(-2, -1)  # (B, H, 1 or s, 1)
    new = torch.cat([tokens.k_quad, tokens.v], dim=3)
    counts = sizes.counts_of_state(state, options.chunk_size)
    position, size, s = sizes.one_position(counts), options.chunk_size, tokens.k_quad.shape[3]
    if position is None:
        state = sizes.resized(state, sizes.of_step(counts, size, s))
    own_kv = torch.addcmul(state["own_kv"] * decay, tokens.k_lin.transpose(-2, -1), tokens.v)
    state, out = {**state, "own_kv": own_kv}, None
    if state["sum_kv"].shape[2]:
        state["sum_kv"] = state["sum_kv"] * decay
        out = (tokens.q_lin / size) @ state["sum_kv"]
    step_here = _step_anywhere if position is None else partial(_step_at, position=position)
    local, state = step_here(tokens, new, bias, options, state)
    if local is not None:
        out = local if out is None else out + local
    state["count"] = state["count"] + 1
    if position is None:
        counts = None if counts is None else [count + 1 for count in counts]
        state = sizes.resized(state, sizes.after(counts, size, s, keeps_chunk_before=False))
    return torch.zeros_like(tokens.v) if out is None else out, state


def _step_at(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State, position: int
) -> tuple[Tensor | None, State]:
    """The quadratic term (B, H, 1, e), if there is one, and the next state if all rows are at ``position``.

    ``new`` (B, H, 1, s + e) is the slot of the token; the sums of ``state`` already include the token.
    """
    size, s, length = options.chunk_size, tokens.k_quad.shape[3], sizes.block_length(options.chunk_size)
    slot = position % size
    offset = slot % length
    chunk = state["chunk"][:, :, : slot - offset]
    block, local = torch.cat([state["block"][:, :, :offset], new], dim=2), None
    if options.local:
        keys, values = ([x[..., part] for x in (chunk, block)] for part in (slice(s), slice(s, None)))
        local = attend_at(tokens.q_quad, keys, values, bias, options, slot)
    if offset == length - 1:
        chunk, block = torch.cat([chunk, block], dim=2), block[:, :, :0]
    state = {**state, "chunk": chunk, "block": block}
    if slot == size - 1:
        own_kv, sum_kv = state["own_kv"], state["sum_kv"]
        sums = {"sum_kv": sum_kv + own_kv if sum_kv.shape[2] else own_kv, "own_kv": torch.zeros_like(own_kv)}
        state = {**state, "chunk": chunk[:, :, :0], **sums}
    return local, state


def _step_anywhere(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor | None, State]:
    """``_step_at`` for rows at different positions: with masks in place of slices, and a copy of the chunk."""
    size, s, local = options.chunk_size, tokens.k_quad.shape[3], None
    slot = (state["count"] % size)[:, None]  # (B, 1)
    slots = block_slots(slot, state)  # (B, R)
    block = state["block"].scatter(2, slot_index(slot - slots[:, :1], state["block"]), new)
    chunk = state["chunk"].scatter(2, slot_index(slots, state["chunk"]), block)
    if options.local:
        k_quad, v = chunk.split([s, tokens.v.shape[3]], dim=3)
        scores = (tokens.q_quad / score_divisor(options, s)) @ k_quad.transpose(-2, -1)  # (B, H, 1, slots)
        if bias is not None:
            scores = scores + bias_at(bias, size, slot)[..., : chunk.shape[2]]
        # Slots after the token's are empty, or hold what is left of the chunk before.
        later = (torch.arange(chunk.shape[2], device=slot.device) > slot)[:, None, None]
        local = score_kernel(scores, options.kernel, later) @ v
    if chunk.shape[2] < size:  # no row's chunk is full after this token
        return local, {**state, "chunk": chunk, "block": block}
    full, own_kv = (slot == size - 1)[:, :, None, None], state["own_kv"]  # (B, 1, 1, 1)
    sum_kv = state["sum_kv"] + own_kv.masked_fill(~full, 0.0)
    sums = {"sum_kv": sum_kv, "own_kv": own_kv.masked_fill(full, 0.0)}
    return local, {**state, **sums, "chunk": chunk, "block": block}


def several(
    tokens: Tokens,
    log_decay: Tensor,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    state: State,
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence that begins with its chunk: outputs (B, H, n, e), the next state."""
    batch, _, n, s = tokens.q_quad.shape
    size, e = options.chunk_size, tokens.v.shape[3]
    keeps_largest, state = sizes.keeps_largest(state, size), sizes.resized(state, sizes.largest(size, s))
    slot, slots = (state["count"] % size)[:, None], torch.arange(size, device=tokens.v.device)
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    order = real_first(torch.cat([slots >= slot, padding_mask], dim=1))  # (B, C + n)
    chunk = state["chunk"].scatter(2, slot_index(block_slots(slot, state), state["chunk"]), state["block"])
    k_quad, v = chunk.split([s, e], dim=3)
    k_quad, v = torch.cat([k_quad, tokens.k_quad], dim=2), torch.cat([v, tokens.v], dim=2)
    # The state holds no queries, since their outputs are not needed, and no k_lin and gates, but their decayed sum.
    others = (F.pad(x, (0, 0, size, 0)) for x in (tokens.q_quad, tokens.q_lin, tokens.k_lin, _by_channel(log_decay)))
    # An additional chunk, so that the last full chunk always has a successor.
    rows = (F.pad(take(x, order), (0, 0, 0, size)) for x in (k_quad, v, *others))
    k_quad, v, q_quad, q_lin, k_lin, gates = rows
    frame = Tokens(q_quad, k_quad, q_lin, k_lin, v)
    chunks, sums = _decayed_chunks(frame, gates, state, size)
    out = both_terms(chunks, sums.before, bias, options, hidden_keys(chunks, options, size + n, None), frame, None)
    out = take(out[:, :, : size + n], invert(order))[:, :, size:]
    real = (~padding_mask).sum(1)
    end = slot + real[:, None]  # of the token after the last one
    group = (end // size)[:, :, None, None, None]

    def pick(x: Tensor) -> Tensor:
        return x.gather(2, group.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    # Tokens after the last real one have no gates: what has decayed to the end of its chunk has decayed up to there.
    next_sums = {"sum_kv": pick(sums.before) * pick(sums.decay), "own_kv": pick(sums.own)}
    chunk = pick(torch.cat([chunks.k_quad, chunks.v], dim=4))
    block = chunk.gather(2, slot_index(block_slots(end % size, state), chunk))
    count = state["count"] + real
    next_sizes = sizes.after(sizes.counts_of(count, keeps_largest), size, s, keeps_chunk_before=False)
    return out, sizes.resized({"count": count, **next_sums, "chunk": chunk, "block": block}, next_sizes)


class _Sums(NamedTuple):
    """Sums of every chunk and their decay, (B, H, G, s, e) unless another shape is stated."""

    own: Tensor  # Σ k_lin vᵀ of its tokens, decayed to its end
    before: Tensor  # of the tokens before it, decayed to its start
    decay: Tensor  # what it leaves of the latter, (B, H, G, 1 or s, 1)


def _by_channel(log_decay: Tensor) -> Tensor:
    """(B, H, n) -> (B, H, n, 1); gates by channel unchanged."""
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay


def _decayed_chunks(tokens: Tokens, gates: Tensor, state: State | None, size: int) -> tuple[Tokens, _Sums]:
    """Chunks whose queries of the linear term have decayed since their chunk began, and the sums of each.

    The first chunk continues the chunk of ``state``.
    """
    (q_quad, k_quad, q_lin, k_lin, v), gates = split(tokens, size), split_chunks(gates, size)  # (B, H, G, C, 1 or s)
    # Over the tokens after a key, so that nothing is subtracted.
    after = F.pad(reverse_cumsum(gates.transpose(3, 4))[..., 1:], (0, 1)).transpose(3, 4)
    own = (k_lin * after.exp()).transpose(-2, -1) @ v
    of_chunk = gates.sum(3)
    decay = of_chunk.exp().unsqueeze(-1)
    if state is not None:
        first = own[:, :, 0] + decay[:, :, 0] * state["own_kv"]
        own = torch.cat([first.unsqueeze(2), own[:, :, 1:]], dim=2)
    gates_of_sums = of_chunk.squeeze(3) if of_chunk.shape[3] == 1 else of_chunk
    before, _ = carry_decayed_sums(own, None if state is None else state["sum_kv"], gates_of_sums)
    return Tokens(q_quad, k_quad, q_lin * gates.cumsum(3).exp(), k_lin, v), _Sums(own, before, decay)
