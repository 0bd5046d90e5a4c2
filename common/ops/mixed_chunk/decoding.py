"""Causal mixed chunk attention from a state: shapes of the state, one step, several tokens at once.

The state holds a ring of C slots. A slot is the concatenated k_quad, k_lin and v of a token, 2s + e channels. A token's
slot is its position mod C, so slots below count mod C belong to the current chunk, the others to the previous chunk.
A step does not write into the ring, since that would copy it. It appends to the current *block* of at most R tokens, a
separate entry of the state; a full block is moved into the ring. Before a block begins, the previous chunk's tokens in
its slots are moved into ``sum_kv``, the sum over all tokens that have left the ring, and the slots are 0 until the
block is moved. So a step moves at most R tokens into the sum. While the first chunk fills, the ring ends with its last
full block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import carry_sums
from ..shared.padding import invert, real_first, take
from ..shared.relative_bias import bias_at, bias_so_far
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from . import sizes
from .sequence import MixedChunkOptions, Tokens, both_terms, chunk_sums, hidden_keys, score_divisor, split


def state_shapes(tokens: Tokens, held: sizes.Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state with the sizes ``held``."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, held.sums, e),
        "ring": (batch, heads, held.slots, 2 * s + e),
        "block": (batch, heads, held.block, 2 * s + e),
    }


def step(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State) -> tuple[Tensor, State]:
    """One real token after ``state``: its output (B, H, 1, e) and the next state; O(C (s + e) + s e).

    The next state may share tensors with ``state``.
    """
    new = torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3)
    counts = sizes.counts_of_state(state, options.chunk_size)
    position, s = sizes.one_position(counts), tokens.k_quad.shape[3]
    if position is not None:
        out, changed = _step_at(tokens, new, bias, options, state, position)
        return out, {**state, **changed, "count": state["count"] + 1}
    state = sizes.resized(state, sizes.of_step(counts, options.chunk_size, s))
    out, changed = _step_anywhere(tokens, new, bias, options, state)
    state = {**state, **changed, "count": state["count"] + 1}
    counts = None if counts is None else [count + 1 for count in counts]
    return out, sizes.resized(state, sizes.after(counts, options.chunk_size, s, keeps_chunk_before=True))


def _step_at(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State, position: int
) -> tuple[Tensor, State]:
    """The output (B, H, 1, e) and the changed entries of the state if all rows are at ``position``.

    ``new`` (B, H, 1, 2s + e) is the slot of the token.
    """
    size, s, length = options.chunk_size, tokens.q_quad.shape[3], sizes.block_length(options.chunk_size)
    ring, slot = state["ring"], position % size
    offset = slot % length
    begin = slot - offset
    block = torch.cat([state["block"][:, :, :offset], new], dim=2)
    out = 0.0
    if options.local:
        current = [ring[:, :, :begin], block]
        keys, values = ([x[..., part] for x in current] for part in (slice(s), slice(2 * s, None)))
        out = attend_at(tokens.q_quad, keys, values, bias, options, slot)
    if options.linear and position >= size:
        q, before = tokens.q_lin / size, ring[:, :, begin + length :]
        out = out + q @ state["sum_kv"] + q @ before[..., s : 2 * s].transpose(-2, -1) @ before[..., 2 * s :]
    out = torch.zeros_like(tokens.v) if isinstance(out, float) else out
    if offset < length - 1:
        return out, {"block": block}
    if position < size:
        return out, _moved_first(ring[:, :, :begin], block, state["sum_kv"], s, size)
    return out, _moved(ring, block, state["sum_kv"], begin)


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


def _moved_first(ring: Tensor, block: Tensor, sum_kv: Tensor, s: int, chunk_size: int) -> State:
    """``_moved`` in the first chunk, whose tokens leave when it is full; until then the ring ends with ``block``."""
    ring, moved = torch.cat([ring, block], dim=2), {"block": block[:, :, :0]}
    if ring.shape[2] < chunk_size:
        return {**moved, "sum_kv": sum_kv[:, :, :0], "ring": ring}
    length = block.shape[2]
    _, k, v = _parts(ring[:, :, :length], s)
    return {**moved, "sum_kv": k.transpose(-2, -1) @ v, "ring": F.pad(ring[:, :, length:], (0, 0, length, 0))}


def _moved(ring: Tensor, block: Tensor, sum_kv: Tensor, begin: int) -> State:
    """Ring, block and sum after a full ``block``, whose slots start at ``begin``, is moved into the ring."""
    length, size = block.shape[2], ring.shape[2]
    following = (begin + length) % size
    ring = ring.clone()
    ring[:, :, begin : begin + length] = block
    _, k, v = _parts(ring[:, :, following : following + length].clone(), sum_kv.shape[2])
    ring[:, :, following : following + length] = 0.0
    return {"sum_kv": sum_kv + k.transpose(-2, -1) @ v, "ring": ring, "block": block[:, :, :0]}


def _step_anywhere(
    tokens: Tokens, new: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor, State]:
    """``_step_at`` for rows at different positions: with masks in place of slices, and a copy of the ring.

    The ring has fewer than C slots if the first chunk of no row is full after this token.
    """
    slot = (state["count"] % options.chunk_size)[:, None]  # (B, 1)
    slots = block_slots(slot, state)
    block = state["block"].scatter(2, slot_index(slot - slots[:, :1], state["block"]), new)
    out = _attend_anywhere(tokens, bias, options, {**state, "block": block}, slot)
    ring = state["ring"].scatter(2, slot_index(slots, state["ring"]), block)
    full = (slot == slots[:, -1:])[:, :, None, None]  # (B, 1, 1, 1)
    changed = {"ring": torch.where(full, ring, state["ring"]), "block": block.masked_fill(full, 0.0)}
    if ring.shape[2] < options.chunk_size:
        return out, changed
    following = slot_index((slots + slots.shape[1]) % options.chunk_size, ring)
    _, k, v = _parts(ring.gather(2, following).masked_fill(~full, 0.0), state["sum_kv"].shape[2])
    return out, {
        **changed,
        "sum_kv": state["sum_kv"] + k.transpose(-2, -1) @ v,
        "ring": torch.where(full, ring.scatter(2, following, 0.0), state["ring"]),
    }


def _attend_anywhere(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State, slot: Tensor
) -> Tensor:
    """The output (B, H, 1, e) of tokens in ``slot`` (B, 1) of the chunk; the block already contains them."""
    size, s, block = options.chunk_size, tokens.q_quad.shape[3], block_slots(slot, state)
    slot_count = state["ring"].shape[2]
    (_, k_lin, values), values_of_block = _parts(state["ring"], s), _parts(state["block"], s)[2]
    slots = torch.arange(slot_count, device=slot.device)
    in_ring, in_block = 0.0, None
    if options.local:
        hidden = torch.cat([slots >= block[:, :1], block > slot], dim=1)[:, None, None]  # (B, 1, 1, slots + R)
        q = tokens.q_quad / score_divisor(options, s)
        scores = torch.cat([q @ _parts(state[x], s)[0].transpose(-2, -1) for x in ("ring", "block")], dim=3)
        if bias is not None:
            row = bias_at(bias, size, slot)  # (B, 1 or H, 1, C)
            of_block = row.gather(3, block[:, None, None].expand(-1, row.shape[1], 1, -1))
            scores = scores + torch.cat([row[..., :slot_count], of_block], dim=3)
        in_ring, in_block = score_kernel(scores, options.kernel, hidden).split([slot_count, block.shape[1]], dim=3)
    out = 0.0
    if options.linear and slot_count == size:
        q = tokens.q_lin / size
        before = (slots > block[:, -1:])[:, None, None]  # (B, 1, 1, C): tokens left of the previous chunk
        in_ring, out = in_ring + (q @ k_lin.transpose(-2, -1)).masked_fill(~before, 0.0), q @ state["sum_kv"]
    if isinstance(in_ring, Tensor):
        out = out + in_ring @ values
    if in_block is not None:
        out = out + in_block @ values_of_block
    return out if isinstance(out, Tensor) else torch.zeros_like(tokens.v)


def block_slots(slot: Tensor, state: State) -> Tensor:
    """The slots (B, R) of the block that contains ``slot`` (B, 1)."""
    size = state["block"].shape[2]
    return slot - slot % size + torch.arange(size, device=slot.device)


def slot_index(slots: Tensor, ring: Tensor) -> Tensor:
    """``slots`` (B, R) as an index of dimension 2 of ``ring`` (B, H, C, c): (B, H, R, c)."""
    return slots[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3])


def _parts(x: Tensor, s: int) -> tuple[Tensor, ...]:
    """k_quad, k_lin and v of slots x (B, H, C, 2s + e)."""
    return x.split([s, s, x.shape[3] - 2 * s], dim=3)


def several(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence that begins with its two chunks: outputs (B, H, n, e), next state."""
    batch, n, size, s = tokens.v.shape[0], tokens.v.shape[2], options.chunk_size, tokens.k_lin.shape[3]
    keeps_largest, state = sizes.keeps_largest(state, size), sizes.resized(state, sizes.largest(size, s))
    slot = (state["count"] % size)[:, None]  # (B, 1)
    slots, block = torch.arange(size, device=slot.device), block_slots(slot, state)
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    current = slots < slot  # (B, C): slots of the current chunk
    frame_padding = torch.cat([torch.zeros_like(current), ~current, padding_mask], dim=1)  # (B, 2C + n)
    order = real_first(frame_padding)
    ring = state["ring"].scatter(2, slot_index(block, state["ring"]), state["block"])
    before = slots > block[:, -1:]  # (B, C): slots of the previous chunk
    frame = [ring.masked_fill(~which[:, None, :, None], 0.0) for which in (before, current)]
    frame = torch.cat([*frame, torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3)], dim=2)
    k_quad, k_lin, v = _parts(take(frame, order), s)
    # The state holds no queries: their outputs are not needed.
    q_quad, q_lin = (take(F.pad(x, (0, 0, 2 * size, 0)), order) for x in (tokens.q_quad, tokens.q_lin))
    frame = Tokens(q_quad, k_quad, q_lin, k_lin, v)
    # An additional chunk, so that the last full chunk always has a successor.
    chunks = split(Tokens(*(F.pad(x, (0, 0, 0, size)) for x in frame)), size)
    sums, _ = carry_sums(chunk_sums(chunks), state["sum_kv"])  # (B, H, G, s, e): before each chunk
    hidden = hidden_keys(chunks, options, n, None)
    out = both_terms(chunks, sums if options.linear else None, bias, options, hidden, frame, None)
    out = take(out[:, :, : 2 * size + n], invert(order))[:, :, 2 * size :]
    real = (~padding_mask).sum(1)
    new_state = _state_at(chunks, sums, size + slot + real[:, None], state)  # real tokens of the frame
    count = state["count"] + real
    next_sizes = sizes.after(sizes.counts_of(count, keeps_largest), size, s, keeps_chunk_before=True)
    return out, sizes.resized({**new_state, "count": count}, next_sizes)


def _state_at(chunks: Tokens, sums: Tensor, end: Tensor, state: State) -> State:
    """The state after ``end`` (B, 1) tokens of ``chunks`` (B, H, G, C, c), without the count.

    ``sums`` are over the chunks before each chunk; only the sizes of ``state`` are used.
    """
    size = state["ring"].shape[2]
    group, slot = (end // size)[:, :, None, None, None], end % size  # (B, 1, 1, 1, 1), at least 1
    slots, block = torch.arange(size, device=end.device), block_slots(slot, state)

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(2, index.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    side_by_side = torch.cat([chunks.k_quad, chunks.k_lin, chunks.v], dim=4)
    before, current = pick(side_by_side, group - 1), pick(side_by_side, group)
    left = (slots <= block[:, -1:])[:, None, :, None]  # (B, 1, C, 1)
    _, k, v = _parts(before.masked_fill(~left, 0.0), chunks.k_lin.shape[4])
    ring = current.masked_fill((slots >= block[:, :1])[:, None, :, None], 0.0) + before.masked_fill(left, 0.0)
    newest = current.gather(2, slot_index(block, current)).masked_fill((block >= slot)[:, None, :, None], 0.0)
    return {"sum_kv": pick(sums, group - 1) + k.transpose(-2, -1) @ v, "ring": ring, "block": newest}
