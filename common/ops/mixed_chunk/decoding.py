"""Causal mixed chunk attention from a state: its shapes, one step, several tokens at once.

The state holds a ring of C slots. A slot has a token's k_quad, k_lin and v side by side, 2s + e channels. A token's
slot is its position mod C, so slots below count mod C hold the current chunk, and the others the chunk before it. A
step does not write into the ring, since that would copy it. It writes into the current *block* of R slots, which the
state holds apart; a full block is moved into the ring, and what the ring holds in its place until then counts for
nothing. ``sum_kv`` is the sum over all tokens whose slots a later block has taken over. A new block takes over its
slots at once, so that no step moves more than R tokens into the sum.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import carry_sums
from ..shared.padding import invert, real_first, take
from ..shared.precision import compute_dtype
from ..shared.relative_bias import bias_at, bias_so_far
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from ..shared.tracing import runs_eagerly
from .sequence import MixedChunkOptions, Tokens, both_terms, chunk_sums, hidden_keys, score_divisor, split

#: A block has as many slots as divide a chunk, at most so many.
_LARGEST_BLOCK = 16


def state_shapes(tokens: Tokens, chunk_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    block = max(size for size in range(1, min(chunk_size, _LARGEST_BLOCK) + 1) if chunk_size % size == 0)
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, s, e),
        "ring": (batch, heads, chunk_size, 2 * s + e),
        "block": (batch, heads, block, 2 * s + e),
    }


def empty_state(tokens: Tokens, chunk_size: int) -> State:
    """The state before the first token."""
    like = {"dtype": compute_dtype(tokens.v), "device": tokens.v.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(tokens, chunk_size).items()}
    state["count"] = state["count"].long()
    return state


def step(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State) -> tuple[Tensor, State]:
    """One token after ``state``, not padding: its output (B, H, 1, e) and the next state; O(C (s + e) + s e).

    The next state may share tensors with ``state``.
    """
    slot = (state["count"] % options.chunk_size)[:, None]  # (B, 1)
    block = _block(slot, state)
    at = _index(slot - block[:, :1], state["block"])
    state = {**state, "block": state["block"].scatter(2, at, torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3))}
    position = _one_position(state["count"])
    attend = _attend_anywhere if position is None else _attend_at
    out = attend(tokens, bias, options, state, slot if position is None else position)
    full = (slot == block[:, -1:])[:, 0]
    if position is None or bool(full[0]):
        state = {**state, **_moved(state, block, full)}
    return out, {**state, "count": state["count"] + 1}


def _one_position(count: Tensor) -> int | None:
    """The position of every row, if it is one and may be looked at: on a CPU, where nothing traces."""
    if count.device.type != "cpu" or not runs_eagerly(count):
        return None
    counts = count.tolist()
    return counts[0] if counts and counts.count(counts[0]) == len(counts) else None


def _attend_at(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State, position: int
) -> Tensor:
    """The output (B, H, 1, e) of the token at ``position`` of all rows, which is in the block already."""
    size, s, slot = options.chunk_size, tokens.q_quad.shape[3], position % options.chunk_size
    place = slot % state["block"].shape[2]
    begin, end = slot - place, slot - place + state["block"].shape[2]
    current = [x for x in (state["ring"][:, :, :begin], state["block"][:, :, : place + 1]) if x.shape[2]]
    out = 0.0
    if options.local:
        q = tokens.q_quad / score_divisor(options, s)
        scores = torch.cat([q @ x[..., :s].transpose(-2, -1) for x in current], dim=3)
        if bias is not None:
            scores = scores + bias_so_far(bias, size, slot)
        weights = score_kernel(scores, options.kernel, None).split([x.shape[2] for x in current], dim=3)
        out = sum(w @ x[..., 2 * s :] for w, x in zip(weights, current))
    if options.linear and position >= size:
        q, before = tokens.q_lin / size, state["ring"][:, :, end:]
        out = out + q @ state["sum_kv"] + q @ before[..., s : 2 * s].transpose(-2, -1) @ before[..., 2 * s :]
    return torch.zeros_like(tokens.v) if isinstance(out, float) else out


def _attend_anywhere(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State, slot: Tensor
) -> Tensor:
    """``_attend_at`` where each row has a ``slot`` (B, 1) of its own: masks in place of parts of the ring."""
    size, s, block = options.chunk_size, tokens.q_quad.shape[3], _block(slot, state)
    (_, k_lin, values), values_of_block = _parts(state["ring"], s), _parts(state["block"], s)[2]
    slots = torch.arange(size, device=slot.device)
    in_ring, in_block = 0.0, None
    if options.local:
        hidden = torch.cat([slots >= block[:, :1], block > slot], dim=1)[:, None, None]  # (B, 1, 1, C + R)
        q = tokens.q_quad / score_divisor(options, s)
        scores = torch.cat([q @ _parts(state[x], s)[0].transpose(-2, -1) for x in ("ring", "block")], dim=3)
        if bias is not None:
            row = bias_at(bias, size, slot)  # (B, 1 or H, 1, C)
            of_block = row.gather(3, block[:, None, None].expand(-1, row.shape[1], 1, -1))
            scores = scores + torch.cat([row, of_block], dim=3)
        in_ring, in_block = score_kernel(scores, options.kernel, hidden).split([size, block.shape[1]], dim=3)
    out = 0.0
    if options.linear:
        q = tokens.q_lin / size
        before = (slots > block[:, -1:])[:, None, None]  # (B, 1, 1, C): what is left of the chunk before
        in_ring, out = in_ring + (q @ k_lin.transpose(-2, -1)).masked_fill(~before, 0.0), q @ state["sum_kv"]
    out = out + in_ring @ values
    return out if in_block is None else out + in_block @ values_of_block


def _moved(state: State, block: Tensor, full: Tensor) -> State:
    """The ring with the state's block in the slots ``block`` (B, R), and the sum with what the next block takes over.

    ``full`` (B,): whether a row's block is; where it is not, what is moved counts for nothing.
    """
    ring = state["ring"].scatter(2, _index(block, state["ring"]), state["block"])
    size, s = ring.shape[2], state["sum_kv"].shape[2]
    _, k, v = _parts(ring.gather(2, _index((block + block.shape[1]) % size, ring)), s)
    k = k.masked_fill(~full[:, None, None, None], 0.0)
    return {"ring": ring, "sum_kv": state["sum_kv"] + k.transpose(-2, -1) @ v}


def _block(slot: Tensor, state: State) -> Tensor:
    """The slots of the block that ``slot`` (B, 1) is in, (B, R)."""
    size = state["block"].shape[2]
    return slot - slot % size + torch.arange(size, device=slot.device)


def _index(slots: Tensor, ring: Tensor) -> Tensor:
    """``slots`` (B, R) as an index of dimension 2 of ``ring`` (B, H, C, c): (B, H, R, c)."""
    return slots[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3])


def _parts(x: Tensor, s: int) -> tuple[Tensor, ...]:
    """k_quad, k_lin and v of slots x (B, H, C, 2s + e)."""
    return x.split([s, s, x.shape[3] - 2 * s], dim=3)


def several(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence of its two chunks and them: outputs (B, H, n, e) and the next state."""
    batch, n, size = tokens.v.shape[0], tokens.v.shape[2], options.chunk_size
    slot = (state["count"] % size)[:, None]  # (B, 1)
    slots, block = torch.arange(size, device=slot.device), _block(slot, state)
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    current = slots < slot  # (B, C): slots of the current chunk
    frame_padding = torch.cat([torch.zeros_like(current), ~current, padding_mask], dim=1)  # (B, 2C + n)
    order = real_first(frame_padding)
    ring = state["ring"].scatter(2, _index(block, state["ring"]), state["block"])
    before = slots > block[:, -1:]  # (B, C): slots of the chunk before
    frame = [ring.masked_fill(~which[:, None, :, None], 0.0) for which in (before, current)]
    frame = torch.cat([*frame, torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3)], dim=2)
    k_quad, k_lin, v = _parts(take(frame, order), tokens.k_lin.shape[3])
    # The state holds no queries, and needs none.
    q_quad, q_lin = (take(F.pad(x, (0, 0, 2 * size, 0)), order) for x in (tokens.q_quad, tokens.q_lin))
    frame = Tokens(q_quad, k_quad, q_lin, k_lin, v)
    # One chunk more, so that there is always one after the last full one.
    chunks = split(Tokens(*(F.pad(x, (0, 0, 0, size)) for x in frame)), size)
    sums, _ = carry_sums(chunk_sums(chunks), state["sum_kv"])  # (B, H, G, s, e): before each chunk
    hidden = hidden_keys(chunks, options, n, None)
    out = both_terms(chunks, sums if options.linear else None, bias, options, hidden, frame, None)
    out = take(out[:, :, : 2 * size + n], invert(order))[:, :, 2 * size :]
    real = (~padding_mask).sum(1)
    new_state = _state_at(chunks, sums, size + slot + real[:, None], state)  # real tokens of the frame
    return out, {**new_state, "count": state["count"] + real}


def _state_at(chunks: Tokens, sums: Tensor, end: Tensor, state: State) -> State:
    """The state after ``end`` (B, 1) tokens of ``chunks`` (B, H, G, C, c), but for the count.

    ``sums`` are those before each chunk, ``state`` is any.
    """
    size = state["ring"].shape[2]
    group, slot = (end // size)[:, :, None, None, None], end % size  # (B, 1, 1, 1, 1), at least 1
    slots, block = torch.arange(size, device=end.device), _block(slot, state)

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(2, index.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    side_by_side = torch.cat([chunks.k_quad, chunks.k_lin, chunks.v], dim=4)
    before, current = pick(side_by_side, group - 1), pick(side_by_side, group)
    ring = torch.where((slots < slot)[:, None, :, None], current, before)
    _, k, v = _parts(before, chunks.k_lin.shape[4])
    k = k.masked_fill((slots > block[:, -1:])[:, None, :, None], 0.0)  # those that the block has not taken over
    sum_kv = pick(sums, group - 1) + k.transpose(-2, -1) @ v
    return {"sum_kv": sum_kv, "ring": ring, "block": ring.gather(2, _index(block, ring))}
