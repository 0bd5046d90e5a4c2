"""Sizes of a state of causal mixed chunk attention: as small as the tokens so far allow, if their number is known.

A state has slots for the tokens of a chunk, a block of fewer than R tokens, and sums over earlier chunks and over the
current one, which have no rows before they have a token. On a GPU, and under tracing, token counts are not read: these
entries then have their largest size from the beginning, with a block of R slots. A state of the largest size keeps it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.state import State, begins_largest
from ..shared.tracing import runs_eagerly

#: The largest number of slots of a block; the number divides the chunk size.
_LARGEST_BLOCK = 16
#: The field of ``Sizes`` for each entry of a state.
_FIELDS = {"chunk": "slots", "block": "block", "sum_kv": "sums", "own_kv": "own"}


class Sizes(NamedTuple):
    """Sizes of dimension 2 of the entries of a state."""

    slots: int
    block: int
    sums: int
    own: int

    def of(self, name: str) -> int | None:
        """The size of the entry ``name``; None for an entry whose size never changes."""
        return getattr(self, _FIELDS[name]) if name in _FIELDS else None


def block_length(chunk_size: int) -> int:
    """R, the number of slots of a block."""
    return next(size for size in range(min(chunk_size, _LARGEST_BLOCK), 0, -1) if chunk_size % size == 0)


def counts_of(count: Tensor, keeps_largest: bool) -> list[int] | None:
    """Number of tokens of each row; None if the state ``keeps_largest`` sizes or the values may not be read."""
    if keeps_largest or count.device.type != "cpu" or not runs_eagerly(count):
        return None
    return count.tolist()


def keeps_largest(state: State, chunk_size: int) -> bool:
    """Whether ``state`` has the largest sizes, and so keeps them."""
    return state["block"].shape[2] == block_length(chunk_size)


def counts_of_state(state: State, chunk_size: int) -> list[int] | None:
    """``counts_of`` for a ``state``."""
    return counts_of(state["count"], keeps_largest(state, chunk_size))


def first(chunk_size: int, s: int) -> Sizes:
    """Sizes of the state before the first token."""
    return largest(chunk_size, s) if begins_largest() else Sizes(0, 0, 0, 0)


def one_position(counts: list[int] | None) -> int | None:
    """The common position of all rows; None if it is not known or not the same."""
    return counts[0] if counts and counts.count(counts[0]) == len(counts) else None


def largest(chunk_size: int, s: int) -> Sizes:
    """The largest possible sizes."""
    return Sizes(chunk_size, block_length(chunk_size), s, s)


def after(counts: list[int] | None, chunk_size: int, s: int, forgets: bool) -> Sizes:
    """Sizes after ``counts`` tokens; with gates, each is in the sum of its chunk at once."""
    if counts is None:
        return largest(chunk_size, s)
    length, slots = block_length(chunk_size), [count % chunk_size for count in counts]
    has_sum = max(counts, default=0) >= chunk_size
    full_blocks = max((slot - slot % length for slot in slots), default=0)
    in_block = max((slot % length for slot in slots), default=0)
    has_own = has_sum or full_blocks or (forgets and in_block)
    return Sizes(full_blocks, in_block, s if has_sum else 0, s if has_own else 0)


def of_step(counts: list[int] | None, chunk_size: int, s: int) -> Sizes:
    """Sizes for a step in which rows write into different slots: whole blocks of slots, and one block."""
    most = largest(chunk_size, s)
    slots = chunk_size if counts is None else (max(counts, default=0) // most.block + 1) * most.block
    return most if slots >= chunk_size else Sizes(slots, most.block, 0, s)


def resized(state: State, sizes: Sizes) -> State:
    """``state`` with dimension 2 of its entries cut, or padded with zeros, at the end; O(size of changed entries)."""
    return {name: _resized(x, sizes.of(name)) for name, x in state.items()}


def _resized(x: Tensor, size: int | None) -> Tensor:
    if size is None or x.shape[2] == size:
        return x
    return x[:, :, :size] if x.shape[2] > size else F.pad(x, (0, 0, 0, size - x.shape[2]))


def of_state(state: State | None, chunk_size: int, s: int, forgets: bool) -> Sizes:
    """The sizes of ``state`` if they are allowed: at least what its tokens require, at most the largest."""
    count = state.get("count") if isinstance(state, dict) else None
    is_count = isinstance(count, Tensor) and count.dim() == 1 and count.dtype == torch.int64
    counts, most = counts_of(count, keeps_largest=False) if is_count else None, largest(chunk_size, s)
    least = Sizes(0, 0, 0, 0) if counts is None else after(counts, chunk_size, s, forgets)
    base = most if counts is None else least
    sizes = {  # torch 2.6 does not compile _replace
        "slots": base.slots,
        "block": base.block,
        "sums": base.sums,
        "own": base.own,
    }
    for name, field in _FIELDS.items():
        entry = state.get(name) if isinstance(state, dict) else None
        size = entry.shape[2] if isinstance(entry, Tensor) and entry.dim() == 4 else -1
        # A sum has either all of its rows or no rows.
        if least.of(name) <= size <= most.of(name) and (name not in ("sum_kv", "own_kv") or size in (0, s)):
            sizes[field] = size
    return Sizes(**sizes)
