"""Causal mixed chunk attention from a state, with and without gates: shapes, one step, several tokens at once.

The state holds k_quad and v of the current chunk's tokens in at most C slots, s + e channels each, but for those of the
current *block* of at most R tokens, which it holds apart: a step adds to the block, and a full block is moved into the
chunk, since a step that wrote into the chunk would copy all of it. And two sums Σ k_lin vᵀ: ``sum_kv`` over the chunks
before and ``own_kv`` of the current chunk, which no query reads before it is full, without rows before there is one.
With gates, both have decayed up to the last token. Without them ``own_kv`` is over the full blocks, so that only one
step in R adds to it, and the block holds k_lin too.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.padding import invert, real_first, take
from ..shared.relative_bias import bias_at, bias_so_far
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from . import sizes
from .forgetting import by_channel, sums_of_chunks
from .sequence import MixedChunkOptions, Tokens, both_terms, hidden_keys, score_divisor


def state_shapes(tokens: Tokens, held: sizes.Sizes, forgets: bool) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state with the sizes ``held``; ``forgets`` with gates."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, held.sums, e),
        "own_kv": (batch, heads, held.own, e),
        "chunk": (batch, heads, held.slots, s + e),
        "block": (batch, heads, held.block, s + e if forgets else 2 * s + e),
    }


def step(
    tokens: Tokens, log_decay: Tensor | None, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor, State]:
    """One real token after ``state``: its output (B, H, 1, e) and the next state; O(C (s + e) + s e).

    The next state may share tensors with ``state``.
    """
    counts = sizes.counts_of_state(state, options.chunk_size)
    position, size, s = sizes.one_position(counts), options.chunk_size, tokens.k_quad.shape[3]
    state = dict(state) if position is not None else sizes.resized(state, sizes.of_step(counts, size, s))
    if log_decay is not None:
        decay = by_channel(log_decay).exp().transpose(-2, -1)  # (B, H, 1 or s, 1)
        new_kv, own_kv = tokens.k_lin.transpose(-2, -1) @ tokens.v, state["own_kv"]
        state["own_kv"] = torch.addcmul(new_kv, own_kv, decay) if own_kv.shape[2] else new_kv
        state["sum_kv"] = state["sum_kv"] * decay if state["sum_kv"].shape[2] else state["sum_kv"]
    out = None
    if options.linear and state["sum_kv"].shape[2]:
        out = (tokens.q_lin / size) @ state["sum_kv"]
    new = torch.cat([tokens.k_quad, tokens.v, *([tokens.k_lin] if log_decay is None else [])], dim=3)
    step_here = _step_anywhere if position is None else partial(_step_at, position=position)
    local, state = step_here(tokens, new, bias, options, state)
    if local is not None:
        out = local if out is None else out + local
    state["count"] = state["count"] + 1
    if position is None:
        counts = None if counts is None else [count + 1 for count in counts]
        state = sizes.resized(state, sizes.after(counts, size, s, log_decay is not None))
    return torch.zeros_like(tokens.v) if out is None else out, state


def _step_at(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State, position: int
) -> tuple[Tensor | None, State]:
    """The quadratic term (B, H, 1, e), if there is one, and the next state if all rows are at ``position``.

    ``new`` is the slot of the token in the block; sums that decay already include the token.
    """
    size, s, length = options.chunk_size, tokens.k_quad.shape[3], sizes.block_length(options.chunk_size)
    slot, channels = position % size, s + tokens.v.shape[3]
    offset = slot % length
    chunk = state["chunk"][:, :, : slot - offset]
    block, own_kv, local = torch.cat([state["block"][:, :, :offset], new], dim=2), state["own_kv"], None
    if options.local:
        keys, values = ([x[..., part] for x in (chunk, block)] for part in (slice(s), slice(s, channels)))
        local = attend_at(tokens.q_quad, keys, values, bias, options, slot)
    if offset == length - 1:
        own_kv = _added(own_kv, _sum_of_block(block, s, channels)) if block.shape[3] > channels else own_kv
        chunk, block = torch.cat([chunk, block[..., :channels]], dim=2), block[:, :, :0]
    state = {**state, "own_kv": own_kv, "chunk": chunk, "block": block}
    if slot == size - 1:
        sums = {"sum_kv": _added(state["sum_kv"], own_kv), "own_kv": torch.zeros_like(own_kv)}
        state = {**state, **sums, "chunk": chunk[:, :, :0]}
    return local, state


def _added(sum_kv: Tensor, more: Tensor) -> Tensor:
    """Their sum; the first may have no rows."""
    return sum_kv + more if sum_kv.shape[2] else more


def _sum_of_block(block: Tensor, s: int, channels: int) -> Tensor:
    """Σ k_lin vᵀ over the tokens of a block without gates."""
    return block[..., channels:].transpose(-2, -1) @ block[..., s:channels]


def attend_at(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    options: MixedChunkOptions,
    slot: int,
) -> Tensor:
    """The quadratic term (B, H, 1, e) of q (B, H, 1, s) in ``slot``.

    ``keys`` and ``values`` (B, H, m, s or e) of the tokens of its chunk up to itself are in two parts; the first part
    may be empty.
    """
    parts = [(k, v) for k, v in zip(keys, values) if k.shape[2]]
    q = q / score_divisor(options, q.shape[3])
    scores = [torch.matmul(q, k.transpose(-2, -1)) for k, _ in parts]
    scores = scores[0] if len(parts) == 1 else torch.cat(scores, dim=3)
    if bias is not None:
        scores = scores + bias_so_far(bias, options.chunk_size, slot)
    weights = score_kernel(scores, options.kernel, None)
    if len(parts) == 1:
        return weights @ parts[0][1]
    first, second = weights.split([k.shape[2] for k, _ in parts], dim=3)
    return first @ parts[0][1] + second @ parts[1][1]


def _step_anywhere(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor | None, State]:
    """``_step_at`` for rows at different positions: with masks in place of slices, and a copy of the chunk."""
    size, s, local = options.chunk_size, tokens.k_quad.shape[3], None
    channels, slot = s + tokens.v.shape[3], (state["count"] % size)[:, None]  # (B, 1)
    slots = block_slots(slot, state)  # (B, R)
    block = state["block"].scatter(2, slot_index(slot - slots[:, :1], state["block"]), new)
    chunk = state["chunk"].scatter(2, slot_index(slots, state["chunk"]), block[..., :channels])
    if options.local:
        k_quad, v = chunk.split([s, tokens.v.shape[3]], dim=3)
        scores = (tokens.q_quad / score_divisor(options, s)) @ k_quad.transpose(-2, -1)  # (B, H, 1, slots)
        if bias is not None:
            scores = scores + bias_at(bias, size, slot)[..., : chunk.shape[2]]
        later = (torch.arange(chunk.shape[2], device=slot.device) > slot)[:, None, None]  # (B, 1, 1, slots)
        local = score_kernel(scores, options.kernel, later) @ v
    own_kv, ends = state["own_kv"], (slot == slots[:, -1:])[:, :, None, None]  # (B, 1, 1, 1)
    if block.shape[3] > channels:
        own_kv = own_kv + _sum_of_block(block.masked_fill(~ends, 0.0), s, channels)
    state = {**state, "own_kv": own_kv, "chunk": chunk, "block": block.masked_fill(ends, 0.0)}
    if chunk.shape[2] < size:  # no row's chunk is full after this token
        return local, state
    full = (slot == size - 1)[:, :, None, None]  # (B, 1, 1, 1)
    sum_kv = state["sum_kv"] + own_kv.masked_fill(~full, 0.0)
    sums = {"sum_kv": sum_kv, "own_kv": own_kv.masked_fill(full, 0.0)}
    return local, {**state, **sums, "chunk": chunk.masked_fill(full, 0.0)}


def block_slots(slot: Tensor, state: State) -> Tensor:
    """The slots (B, R) of the block that contains ``slot`` (B, 1)."""
    size = state["block"].shape[2]
    return slot - slot % size + torch.arange(size, device=slot.device)


def slot_index(slots: Tensor, chunk: Tensor) -> Tensor:
    """``slots`` (B, R) as an index of dimension 2 of ``chunk`` (B, H, C, c): (B, H, R, c)."""
    return slots[:, None, :, None].expand(-1, chunk.shape[1], -1, chunk.shape[3])


def several(
    tokens: Tokens,
    log_decay: Tensor | None,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    state: State,
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence that begins with its chunk: outputs (B, H, n, e), the next state."""
    batch, _, n, s = tokens.q_quad.shape
    size, e, forgets = options.chunk_size, tokens.v.shape[3], log_decay is not None
    keeps_largest, state = sizes.keeps_largest(state, size), sizes.resized(state, sizes.largest(size, s))
    slot, slots = (state["count"] % size)[:, None], torch.arange(size, device=tokens.v.device)
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    order = real_first(torch.cat([slots >= slot, padding_mask], dim=1))  # (B, C + n)
    places, block = block_slots(slot, state), state["block"]
    chunk = state["chunk"].scatter(2, slot_index(places, state["chunk"]), block[..., : s + e])
    # The state holds no queries, since their outputs are not needed. ``own_kv`` has k_lin of all but, without gates,
    # the tokens of the block.
    q_quad, q_lin, k_lin = (F.pad(x, (0, 0, size, 0)) for x in (tokens.q_quad, tokens.q_lin, tokens.k_lin))
    if not forgets:
        k_lin = k_lin.scatter(2, slot_index(places, k_lin), block[..., s + e :])
    k_quad, v = (torch.cat(pair, dim=2) for pair in zip(chunk.split([s, e], dim=3), (tokens.k_quad, tokens.v)))
    gates = [F.pad(by_channel(log_decay), (0, 0, size, 0))] if forgets else []
    # An additional chunk, so that the last full chunk always has a successor.
    rows = (F.pad(take(x, order), (0, 0, 0, size)) for x in (q_quad, k_quad, q_lin, k_lin, v, *gates))
    *frame, gates = rows if forgets else (*rows, None)
    frame = Tokens(*frame)
    chunks, sums = sums_of_chunks(frame, gates, state, size)
    linear = sums.before if options.linear else None
    out = both_terms(chunks, linear, bias, options, hidden_keys(chunks, options, size + n, None), frame, None)
    out = take(out[:, :, : size + n], invert(order))[:, :, size:]
    real = (~padding_mask).sum(1)
    end = slot + real[:, None]  # of the token after the last one
    group = (end // size)[:, :, None, None, None]

    def pick(x: Tensor) -> Tensor:
        return x.gather(2, group.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    last = [pick(x) for x in ((chunks.k_quad, chunks.v) if forgets else (chunks.k_quad, chunks.v, chunks.k_lin))]
    places = block_slots(end % size, state)
    last = torch.cat(last, dim=3)
    block = last.gather(2, slot_index(places, last))
    if forgets:
        # Tokens after the last real one have no gates: what has decayed to the end of its chunk has decayed up to
        # there.
        next_sums = {"sum_kv": pick(sums.before) * pick(sums.decay), "own_kv": pick(sums.own)}
    else:
        in_full_blocks = last.masked_fill((slots >= places[:, :1])[:, None, :, None], 0.0)
        own_kv = _sum_of_block(in_full_blocks, s, s + e)
        goes_on = (end < size)[:, :, None, None]  # in the chunk of ``state``
        next_sums = {"sum_kv": pick(sums.before), "own_kv": own_kv + state["own_kv"].masked_fill(~goes_on, 0.0)}
    count = state["count"] + real
    next_sizes = sizes.after(sizes.counts_of(count, keeps_largest), size, s, forgets)
    next_state = {"count": count, **next_sums, "chunk": last[..., : s + e], "block": block}
    return out, sizes.resized(next_state, next_sizes)
