"""The state of causal LSH attention: every token that is among the last C of its bucket in some round.

The unit key, value and codes of a token are held once, whatever the number of rounds. The state holds at most as many
tokens as there were, and at most M = R 2D C, C for each bucket of each round. It grows with the text up to M tokens;
then tokens that no later token can find are dropped. Slots without a token have the code 0.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.state import State
from .hashes import finds, parts_of_codes
from .rounds import finds_first, weighted


def most_held(rotations: Tensor, chunk_size: int) -> int:
    """M, the maximum number of tokens of a state, for ``rotations`` (R, d, D)."""
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


def ranks_of(buckets: Tensor, place: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    """The number of earlier tokens in each token's bucket (B, H, R, n), and of tokens in every bucket (B, H, R, 2D).

    ``place`` is the index of each token when sorted by bucket and position, None for one token. ``count`` (B, H, R, 2D)
    is the number of tokens in every bucket before these. Padding is not counted. O(n + D).
    """
    padded = F.pad(count, (0, 1))  # with the bucket of padding
    new = torch.zeros_like(padded).scatter_add(3, buckets, torch.ones_like(buckets))
    before = padded.gather(3, buckets)
    if place is not None:
        first = new.cumsum(3) - new  # the index of the first token of each bucket
        before = before + place - first.gather(3, buckets)
    return before, (padded + new)[..., :-1]


def step(q: Tensor, k: Tensor, v: Tensor, codes: Tensor, state: State, chunk_size: int) -> Tensor:
    """The output (B, H, 1, e) of one token with ``codes`` (B, H, R, 1) after ``state``; O(L (d + e + R))."""
    visible = finds(codes.transpose(2, 3), state["codes"], chunk_size, True).any(-1).unsqueeze(2)  # (B, H, 1, L)
    scores = (q @ state["k"].transpose(-2, -1)).masked_fill(~visible, -1e35)
    own = scores.new_full((*scores.shape[:3], 1), -1e30)  # the token itself, with weight only if it finds nothing else
    weights = torch.cat([scores, own], dim=3).softmax(-1)
    return weights[..., :-1] @ state["v"] + weights[..., -1:] * v


def attend_held(q: Tensor, codes: Tensor, state: State, kinds: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """In each round, attention of new tokens to tokens of ``state`` that this round is the first to find.

    q (B, H, n, d), ``codes`` (B, H, R, n), ``kinds`` buckets of a round -> outputs as ``attend_rounds``.
    O(L R log L + n R C (d + e + R)).
    """
    rounds, length = codes.shape[2], state["k"].shape[2]
    buckets = parts_of_codes(state["codes"].transpose(2, 3))[0] + 1  # (B, H, R, L): buckets from 1, and 0 for no token
    order = (buckets * length + torch.arange(length, device=q.device)).argsort(-1)
    ends = buckets.new_zeros(*buckets.shape[:3], kinds + 1).scatter_add(3, buckets, torch.ones_like(buckets)).cumsum(3)
    # The tokens of a bucket are sorted by rank: exactly the last C before its end are found.
    last = ends.gather(3, parts_of_codes(codes)[0] + 1).unsqueeze(-1) - chunk_size
    places = last + torch.arange(chunk_size, device=q.device)  # (B, H, R, n, C)
    index = order.gather(3, places.clamp(min=0).flatten(3))  # (B, H, R, n C)

    def gathered(name: str) -> Tensor:
        x = state[name].unsqueeze(2).expand(-1, -1, rounds, -1, -1)
        x = x.gather(3, index.unsqueeze(-1).expand(-1, -1, -1, -1, x.shape[4]))
        return x.unflatten(3, (-1, chunk_size)).flatten(1, 2)  # (B, H R, n, C, channels)

    key_code = gathered("codes").masked_fill((places < 0).flatten(1, 2).unsqueeze(-1), 0)
    code = codes.transpose(2, 3).repeat_interleave(rounds, 1).unsqueeze(3)  # (B, H R, n, 1, R)
    visible = finds_first(code, key_code, chunk_size, True)  # (B, H R, n, 1, C)
    q = q.repeat_interleave(rounds, 1).unsqueeze(3)
    out, total = weighted((q @ gathered("k").transpose(-2, -1)).masked_fill(~visible, -1e35), gathered("v"))
    return out.squeeze(3).unflatten(1, (-1, rounds)), total.squeeze(3).unflatten(1, (-1, rounds))


def extend_state(state: State, k: Tensor, v: Tensor, codes: Tensor, count: Tensor, chunk_size: int, most: int) -> State:
    """``state`` after new tokens: unit keys k (B, H, n, d), values v (B, H, n, e), ``codes`` (B, H, R, n).

    ``count`` (B, H, R, 2D) is the number of tokens of every bucket after them, ``most`` the maximum number of tokens of
    a state. O((L + n) (d + e)).
    """
    new = {"k": k, "v": v, "codes": codes.transpose(2, 3)}
    state = {name: torch.cat([state[name], x], dim=2) for name, x in new.items()}
    length = state["k"].shape[2]
    if length > most:
        empty = (state["codes"] == 0).all(-1)  # (B, H, L + n)
        unused = ~(empty | _may_be_found(state["codes"], count, chunk_size))
        # Empty slots are dropped first, the last of them before others, so that padding changes nothing.
        turn = torch.where(empty, empty.flip(2).cumsum(2).flip(2), empty.sum(2, keepdim=True) + unused.cumsum(2))
        leaves = (empty | unused) & (turn <= length - most)
        places = (~leaves).cumsum(2).sub(1).masked_fill(leaves, most)  # dropped tokens go after the others
        order = torch.empty_like(places[:, :, : most + 1])
        order = order.scatter(2, places, torch.arange(length, device=k.device).expand_as(places))[:, :, :most, None]
        state = {name: x.gather(2, order.expand(-1, -1, -1, x.shape[3])) for name, x in state.items()}
    return {**state, "count": count}


def _may_be_found(codes: Tensor, count: Tensor, chunk_size: int) -> Tensor:
    """Whether tokens with ``codes`` (B, H, m, R) are among the last C of a bucket: (B, H, m)."""
    buckets, ranks = parts_of_codes(codes.transpose(2, 3))  # (B, H, R, m)
    ends = F.pad(count, (1, 0)).gather(3, buckets + 1)  # bucket -1, for no token, is empty
    return ((ranks >= ends - chunk_size) & (buckets >= 0)).any(2)
