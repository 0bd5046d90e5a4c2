"""The state of causal LSH attention: every token that is among the last C of its bucket in some round.

A token is held once, whatever the number of rounds: its unit key, its value, and its codes. These are at most as many
tokens as there were, and at most M = R 2D C, C of each bucket of each round; so the state grows with the text, and a
text of more than M tokens leaves out those that no later one can find. Places without a token have the code 0.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.state import State
from .hashes import finds, parts_of_codes, sorted_order
from .rounds import attend_rounds, together


def most_held(rotations: Tensor, chunk_size: int) -> int:
    """M, the tokens that a state holds at most, for ``rotations`` (R, d, D)."""
    return rotations.shape[0] * 2 * rotations.shape[2] * chunk_size


def state_shapes(q: Tensor, v: Tensor, rotations: Tensor, held: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state of ``held`` tokens, for q (B, H, n, d), v (B, H, n, e)."""
    rounds, buckets = rotations.shape[0], 2 * rotations.shape[2]
    tokens = (*q.shape[:2], held)
    return {
        "k": (*tokens, q.shape[3]),
        "v": (*tokens, v.shape[3]),
        "codes": (*tokens, rounds),
        "count": (*q.shape[:2], rounds, buckets),
    }


def empty_state(shapes: dict[str, tuple[int, ...]], like: Tensor) -> State:
    """The state before the first token, with floating point numbers of the dtype of ``like``."""
    dtypes = {"k": like.dtype, "v": like.dtype, "codes": torch.long, "count": torch.long}
    return {name: like.new_zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


def ranks_of(buckets: Tensor, place: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tokens before each in its bucket (B, H, R, n), and of tokens in every bucket (B, H, R, 2D).

    ``place`` is that of each token when sorted by bucket and position, None for one token. ``count`` (B, H, R, 2D) are
    the tokens before the first of these; those of padding are not counted. O(n + D).
    """
    padded = F.pad(count, (0, 1))  # with the bucket of padding
    new = torch.zeros_like(padded).scatter_add(3, buckets, torch.ones_like(buckets))
    before = padded.gather(3, buckets)
    if place is not None:
        first = new.cumsum(3) - new  # the place of the first token of each bucket
        before = before + place - first.gather(3, buckets)
    return before, (padded + new)[..., :-1]


def step(q: Tensor, k: Tensor, v: Tensor, codes: Tensor, state: State, chunk_size: int) -> Tensor:
    """The output (B, H, 1, e) of one token with ``codes`` (B, H, R, 1) after ``state``; O(L (d + e + R))."""
    found = finds(codes.transpose(2, 3), state["codes"], chunk_size, True).any(-1).unsqueeze(2)  # (B, H, 1, L)
    scores = (q @ state["k"].transpose(-2, -1)).masked_fill(~found, -1e35)
    own = scores.new_full((*scores.shape[:3], 1), -1e30)  # itself only where it finds nothing else
    weights = torch.cat([scores, own], dim=3).softmax(-1)
    return weights[..., :-1] @ state["v"] + weights[..., -1:] * v


def several(q: Tensor, k: Tensor, v: Tensor, codes: Tensor, state: State, chunk_size: int) -> Tensor:
    """The outputs (B, H, n, e) of n tokens, as a sequence of what is held and them; O((L + n) R C (d + e + R)).

    q and unit keys k (B, H, n, d), v (B, H, n, e), ``codes`` (B, H, R, n), which are 0 at padding.
    """
    held = state["k"].shape[2]
    k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
    codes = torch.cat([state["codes"].transpose(2, 3), codes], dim=3)  # (B, H, R, L + n)
    order, place = sorted_order(parts_of_codes(codes)[0])
    # The state holds no queries, and needs none.
    out = together(*attend_rounds(F.pad(q, (0, 0, held, 0)), k, v, order, place, codes, chunk_size, True))
    return out[:, :, held:]


def extend_state(state: State, k: Tensor, v: Tensor, codes: Tensor, count: Tensor, chunk_size: int, most: int) -> State:
    """``state`` after new tokens: unit keys k (B, H, n, d), values v (B, H, n, e), ``codes`` (B, H, R, n).

    ``count`` (B, H, R, 2D) are the tokens of every bucket then, ``most`` those that a state holds. O((L + n) (d + e)).
    """
    new = {"k": k, "v": v, "codes": codes.transpose(2, 3)}
    state = {name: torch.cat([state[name], x], dim=2) for name, x in new.items()}
    length = state["k"].shape[2]
    if length > most:
        empty = (state["codes"] == 0).all(-1)  # (B, H, L + n)
        unused = ~(empty | _may_be_found(state["codes"], count, chunk_size))
        # Places without a token leave first, the last of them before others, so that padding changes nothing.
        turn = torch.where(empty, empty.flip(2).cumsum(2).flip(2), empty.sum(2, keepdim=True) + unused.cumsum(2))
        leaves = (empty | unused) & (turn <= length - most)
        places = (~leaves).cumsum(2).sub(1).masked_fill(leaves, most)  # those that leave go after the others
        order = torch.empty_like(places[:, :, : most + 1])
        order = order.scatter(2, places, torch.arange(length, device=k.device).expand_as(places))[:, :, :most, None]
        state = {name: x.gather(2, order.expand(-1, -1, -1, x.shape[3])) for name, x in state.items()}
    return {**state, "count": count}


def _may_be_found(codes: Tensor, count: Tensor, chunk_size: int) -> Tensor:
    """Whether tokens with ``codes`` (B, H, m, R) are among the last C of a bucket: (B, H, m)."""
    buckets, ranks = parts_of_codes(codes.transpose(2, 3))  # (B, H, R, m)
    ends = F.pad(count, (1, 0)).gather(3, buckets + 1)  # the bucket of no token, -1, has none
    return ((ranks >= ends - chunk_size) & (buckets >= 0)).any(2)
