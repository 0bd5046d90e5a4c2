"""Causal mixed chunk attention from a state: its shapes, one step, several tokens at once.

The state holds rings of C slots. A token's slot is its position mod C, so slots below count mod C hold the current
chunk, and the others the chunk before it. A step does not write into the rings, since that would copy them. It writes
into the current *block* of R slots, which the state holds apart, as ``recent_...``; a full block is moved into the
rings. What the rings hold in its place until then counts for nothing. ``sum_kv`` is the sum over all tokens whose slots
have been taken over by a later block: each block takes over one, so that the cost never piles up.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import carry_sums
from ..shared.padding import invert, real_first, take
from ..shared.precision import compute_dtype
from ..shared.relative_bias import bias_at
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from ..shared.tracing import runs_eagerly
from .sequence import MixedChunkOptions, Tokens, both_terms, chunk_sums, hidden_keys, score_divisor, split

#: A block has as many slots as divide a chunk, at most so many.
_LARGEST_BLOCK = 16
#: What rings are held of.
_RINGS = ("k_quad", "k_lin", "v")


def state_shapes(tokens: Tokens, chunk_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    block = max(size for size in range(1, min(chunk_size, _LARGEST_BLOCK) + 1) if chunk_size % size == 0)
    shapes: dict[str, tuple[int, ...]] = {"count": (batch,), "sum_kv": (batch, heads, s, e)}
    for name, channels in zip(_RINGS, (s, s, e)):
        shapes[name] = (batch, heads, chunk_size, channels)
        shapes[f"recent_{name}"] = (batch, heads, block, channels)
    return shapes


def empty_state(tokens: Tokens, chunk_size: int) -> State:
    """The state before the first token."""
    like = {"dtype": compute_dtype(tokens.v), "device": tokens.v.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(tokens, chunk_size).items()}
    state["count"] = state["count"].long()
    return state


def step(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, state: State) -> tuple[Tensor, State]:
    """One token after ``state``, not padding: its output (B, H, 1, e) and the next state; O(C (s + e) + s e).

    The next state may share its rings with ``state``.
    """
    size, block = options.chunk_size, state["recent_v"].shape[2]
    slot = (state["count"] % size)[:, None]  # (B, 1)
    place = slot % block
    begin = slot - place  # of the block
    at = place[:, None, None]
    recent = {}
    for name in _RINGS:
        held = state[f"recent_{name}"]
        recent[name] = held.scatter(2, at.expand(-1, held.shape[1], 1, held.shape[3]), getattr(tokens, name))
    slots, places = torch.arange(size, device=slot.device), torch.arange(block, device=slot.device)
    in_rings, in_block = 0.0, None
    if options.local:
        hidden = torch.cat([slots >= begin, places > place], dim=1)[:, None, None]  # (B, 1, 1, C + R)
        weights = score_kernel(_scores(tokens, bias, options, slot, begin, state, recent), options.kernel, hidden)
        in_rings, in_block = weights.split([size, block], dim=-1)
    out = 0.0
    if options.linear:
        q_lin = tokens.q_lin / size
        earlier = (q_lin @ state["k_lin"].transpose(-2, -1)).masked_fill((slots < begin + block)[:, None, None], 0.0)
        in_rings, out = in_rings + earlier, q_lin @ state["sum_kv"]
    out = out + in_rings @ state["v"]
    if in_block is not None:
        out = out + in_block @ recent["v"]
    next_state = {**state, "count": state["count"] + 1, **{f"recent_{name}": x for name, x in recent.items()}}
    full = place[:, 0] == block - 1
    if slot.device.type != "cpu" or not runs_eagerly(full) or bool(full.any()):
        next_state.update(_moved(state, recent, begin + places, full))
    return out, next_state


def _scores(
    tokens: Tokens,
    bias: Tensor | None,
    options: MixedChunkOptions,
    slot: Tensor,
    begin: Tensor,
    state: State,
    recent: State,
) -> Tensor:
    """The query's scores of the rings and of the block, (B, H, 1, C + R)."""
    q = tokens.q_quad / score_divisor(options, tokens.q_quad.shape[3])
    scores = torch.cat([q @ x["k_quad"].transpose(-2, -1) for x in (state, recent)], dim=-1)
    if bias is None:
        return scores
    row = bias_at(bias, options.chunk_size, slot)  # (B, 1 or H, 1, C)
    of_block = begin + torch.arange(recent["v"].shape[2], device=slot.device)  # (B, R)
    of_block = of_block[:, None, None].expand(-1, row.shape[1], 1, -1)
    return scores + torch.cat([row, row.gather(3, of_block)], dim=-1)


def _moved(state: State, recent: State, slots: Tensor, full: Tensor) -> State:
    """The rings with ``recent`` in ``slots`` (B, R), and the sum with what the next block takes over.

    ``full`` (B,): whether a row's block is; where it is not, what is moved counts for nothing.
    """
    rings = {name: state[name].scatter(2, _index(slots, state[name]), recent[name]) for name in _RINGS}
    size, block = state["v"].shape[2], slots.shape[1]
    k, v = (rings[name].gather(2, _index((slots + block) % size, rings[name])) for name in ("k_lin", "v"))
    k = k.masked_fill(~full[:, None, None, None], 0.0)
    return {**rings, "sum_kv": state["sum_kv"] + k.transpose(-2, -1) @ v}


def _index(slots: Tensor, ring: Tensor) -> Tensor:
    """``slots`` (B, R) as an index of dimension 2 of ``ring`` (B, H, C, c)."""
    return slots[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3])


def several(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence of its two chunks and them: outputs (B, H, n, e) and the next state."""
    batch, n, size = tokens.v.shape[0], tokens.v.shape[2], options.chunk_size
    slot = (state["count"] % size)[:, None]  # (B, 1)
    block = _block(slot, state)
    slots = torch.arange(size, device=slot.device)
    current, before = slots < slot, slots > block[:, -1:]  # (B, C): slots of the current chunk and of the one before
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    frame_padding = torch.cat([torch.zeros_like(current), ~current, padding_mask], dim=1)  # (B, 2C + n)
    order = real_first(frame_padding)
    no_queries = torch.zeros_like(state["k_lin"])  # the state holds none, and needs none
    frame = []
    for name, x in zip(Tokens._fields, tokens):
        ring = no_queries
        if name in _RINGS:
            ring = state[name].scatter(2, _index(block, state[name]), state[f"recent_{name}"])
        of_before, of_current = (ring.masked_fill(~which[:, None, :, None], 0.0) for which in (before, current))
        frame.append(take(torch.cat([of_before, of_current, x], dim=2), order))
    frame = Tokens(*frame)
    # One chunk more, so that there is always one after the last full one.
    chunks = split(Tokens(*(F.pad(x, (0, 0, 0, size)) for x in frame)), size)
    sums, _ = carry_sums(chunk_sums(chunks), state["sum_kv"])  # (B, H, G, s, e): before each chunk
    hidden = hidden_keys(chunks, options, n, None)
    out = both_terms(chunks, sums if options.linear else None, bias, options, hidden, frame, None)
    out = take(out[:, :, : 2 * size + n], invert(order))[:, :, 2 * size :]
    real = (~padding_mask).sum(1)
    new_state = _state_at(chunks, sums, size + slot + real[:, None], state)  # real tokens of the frame
    return out, {**new_state, "count": state["count"] + real}


def _block(slot: Tensor, state: State) -> Tensor:
    """The slots of the block that ``slot`` (B, 1) is in, (B, R)."""
    block = state["recent_v"].shape[2]
    return slot - slot % block + torch.arange(block, device=slot.device)


def _state_at(chunks: Tokens, sums: Tensor, end: Tensor, state: State) -> State:
    """What is new in ``state`` after ``end`` (B, 1) tokens of ``chunks`` (B, H, G, C, c), but for the count.

    ``sums`` are those before each chunk.
    """
    size = state["v"].shape[2]
    group, slot = (end // size)[:, :, None, None, None], end % size  # (B, 1, 1, 1, 1), at least 1
    slots, block = torch.arange(size, device=end.device), _block(slot, state)
    filled, taken = ((slots < stop)[:, None, :, None] for stop in (slot, block[:, -1:] + 1))  # (B, 1, C, 1)

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(2, index.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    before = {name: pick(getattr(chunks, name), group - 1) for name in _RINGS}
    rings = {name: torch.where(filled, pick(getattr(chunks, name), group), x) for name, x in before.items()}
    recent = {f"recent_{name}": x.gather(2, _index(block, x)) for name, x in rings.items()}
    leaving = before["k_lin"].masked_fill(~taken, 0.0).transpose(-2, -1) @ before["v"]
    return {**rings, **recent, "sum_kv": pick(sums, group - 1) + leaving}
