"""The state of causal LSH attention: the last C keys of every bucket of every round."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.state import State
from .rounds import finds_first, weighted


def state_shapes(q: Tensor, v: Tensor, rotations: Tensor, chunk_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state, for q (B, H, n, d), v (B, H, n, e) and ``rotations`` (R, d, D)."""
    rounds, buckets = rotations.shape[0], 2 * rotations.shape[2]
    rings = (*q.shape[:2], rounds, buckets, chunk_size)
    return {
        "k": (*rings, q.shape[3]),
        "v": (*rings, v.shape[3]),
        "codes": (*rings, rounds),
        "count": (*q.shape[:2], rounds, buckets),
    }


def empty_state(shapes: dict[str, tuple[int, ...]], like: Tensor) -> State:
    """The state before the first token: its keys, in the dtype of ``like``, have the code of none."""
    dtypes = {"k": like.dtype, "v": like.dtype, "codes": torch.long, "count": torch.long}
    return {name: like.new_zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


def ranks_of(buckets: Tensor, place: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tokens before each in its bucket (B, H, R, n), and of tokens in every bucket (B, H, R, 2D).

    ``count`` (B, H, R, 2D) are the tokens before the first of these; those of padding are not counted. O(n + D).
    """
    padded = F.pad(count, (0, 1))  # with the bucket of padding
    new = torch.zeros_like(padded).scatter_add(3, buckets, torch.ones_like(buckets))
    first = new.cumsum(3) - new  # the place of the first token of each bucket
    return place + (padded - first).gather(3, buckets), (padded + new)[..., :-1]


def attend_state(q: Tensor, buckets: Tensor, codes: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """In each round, attention of new tokens to keys of ``state`` that it finds and no earlier round has found.

    q (B, H, n, d), ``buckets`` and ``codes`` (B, H, R, n) -> as ``attend_rounds``. O(R n C (d + e + R)).
    """
    rounds, kinds, chunk_size = state["k"].shape[2:5]
    # The bucket of padding, which finds nothing, has no keys: those of any other do.
    bucket = buckets.clamp(max=kinds - 1)[..., None, None]  # (B, H, R, n, 1, 1)
    k, v, key_code = (
        state[name].gather(3, bucket.expand(-1, -1, -1, -1, chunk_size, state[name].shape[5])).flatten(1, 2)
        for name in ("k", "v", "codes")
    )  # (B, H R, n, C, channels)
    code = codes.transpose(2, 3).repeat_interleave(rounds, 1).unsqueeze(3)  # (B, H R, n, 1, R)
    found = finds_first(code, key_code, chunk_size, True)  # (B, H R, n, 1, C)
    q = q.repeat_interleave(rounds, 1).unsqueeze(3)
    out, total = weighted((q @ k.transpose(-2, -1)).masked_fill(~found, -1e35), v)
    return out.squeeze(3).unflatten(1, (-1, rounds)), total.squeeze(3).unflatten(1, (-1, rounds))


def extend_state(
    state: State, k: Tensor, v: Tensor, buckets: Tensor, ranks: Tensor, codes: Tensor, count: Tensor
) -> State:
    """``state`` after new tokens: unit keys k (B, H, n, d), values v (B, H, n, e), the rest (B, H, R, n).

    ``count`` (B, H, R, 2D) are the tokens of every bucket then. O(n R + R D C (d + e)).
    """
    kinds, chunk_size = state["count"].shape[3], state["k"].shape[4]
    stays = ranks >= F.pad(count, (0, 1)).gather(3, buckets) - chunk_size
    slots = kinds * chunk_size
    slot = torch.where(stays & (buckets < kinds), buckets * chunk_size + ranks % chunk_size, slots)  # (B, H, R, n)

    def written(name: str, new: Tensor) -> Tensor:
        """The rings of ``name`` with ``new`` (B, H, n, channels) in them; what does not stay goes after them."""
        rings = F.pad(state[name].flatten(3, 4), (0, 0, 0, 1))
        index = slot.unsqueeze(-1).expand(-1, -1, -1, -1, new.shape[3])
        rings = rings.scatter(3, index, new.unsqueeze(2).expand_as(index))
        return rings[:, :, :, :slots].unflatten(3, (kinds, chunk_size))

    rings = {"k": written("k", k), "v": written("v", v), "codes": written("codes", codes.transpose(2, 3))}
    return {**rings, "count": count}
