"""Sizes of a state of causal mixed chunk attention: what the tokens so far require, where their number is known.

A state has slots for the tokens of a chunk, a block of fewer than R tokens, and a sum over earlier chunks, which has no
rows before the first chunk is full. On a GPU, and where something traces, numbers of tokens are not looked at: all of
these have their largest size from the beginning, with a block of R slots. A state of the largest size keeps it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.state import State, begins_largest
from ..shared.tracing import runs_eagerly

#: The limit of the slots of a block, whose number divides a chunk.
_LARGEST_BLOCK = 16
#: The sizes that entries of a state have.
_FIELDS = {"ring": "slots", "chunk": "slots", "block": "block", "sum_kv": "sums"}


class Sizes(NamedTuple):
    """Sizes of dimension 2 of the entries of a state."""

    slots: int
    block: int
    sums: int

    def of(self, name: str) -> int | None:
        """The size of the entry ``name``; None for an entry whose size never changes."""
        return getattr(self, _FIELDS[name]) if name in _FIELDS else None


def block_length(chunk_size: int) -> int:
    """R, the slots of a block."""
    return max(size for size in range(1, min(chunk_size, _LARGEST_BLOCK) + 1) if chunk_size % size == 0)


def counts_of(count: Tensor, keeps_largest: bool) -> list[int] | None:
    """The tokens of each row, None where the state ``keeps_largest`` sizes or they may not be looked at."""
    if keeps_largest or count.device.type != "cpu" or not runs_eagerly(count):
        return None
    return count.tolist()


def keeps_largest(state: State, chunk_size: int) -> bool:
    """Whether ``state`` has the largest sizes, which it keeps."""
    return state["block"].shape[2] == block_length(chunk_size)


def counts_of_state(state: State, chunk_size: int) -> list[int] | None:
    """``counts_of`` the tokens of ``state``."""
    return counts_of(state["count"], keeps_largest(state, chunk_size))


def first(chunk_size: int, s: int) -> Sizes:
    """Sizes of the state before the first token."""
    return largest(chunk_size, s) if begins_largest() else Sizes(0, 0, 0)


def one_position(counts: list[int] | None) -> int | None:
    """The position of every row, if it is known and the same."""
    return counts[0] if counts and counts.count(counts[0]) == len(counts) else None


def largest(chunk_size: int, s: int) -> Sizes:
    """Sizes that no state exceeds."""
    return Sizes(chunk_size, block_length(chunk_size), s)


def after(counts: list[int] | None, chunk_size: int, s: int, keeps_chunk_before: bool) -> Sizes:
    """Sizes after ``counts`` tokens of a state that holds the current chunk, and with the flag the one before it."""
    if counts is None:
        return largest(chunk_size, s)
    length, slots = block_length(chunk_size), [count % chunk_size for count in counts]
    has_sum = max(counts, default=0) >= chunk_size
    full_blocks = max((slot - slot % length for slot in slots), default=0)
    in_block = max((slot % length for slot in slots), default=0)
    return Sizes(chunk_size if has_sum and keeps_chunk_before else full_blocks, in_block, s if has_sum else 0)


def of_step(counts: list[int] | None, chunk_size: int, s: int) -> Sizes:
    """Sizes for a step in which each row writes into a slot of its own: whole blocks of slots, and one block."""
    most = largest(chunk_size, s)
    slots = chunk_size if counts is None else (max(counts, default=0) // most.block + 1) * most.block
    return most if slots >= chunk_size else Sizes(slots, most.block, 0)


def resized(state: State, sizes: Sizes) -> State:
    """``state`` with dimension 2 of its entries cut, or filled up with zeros, at the end; O(size) of what changes."""
    return {name: _resized(x, sizes.of(name)) for name, x in state.items()}


def _resized(x: Tensor, size: int | None) -> Tensor:
    if size is None or x.shape[2] == size:
        return x
    return x[:, :, :size] if x.shape[2] > size else F.pad(x, (0, 0, 0, size - x.shape[2]))


def of_state(state: State | None, chunk_size: int, s: int, keeps_chunk_before: bool) -> Sizes:
    """Sizes of a given ``state`` where they are allowed: what its tokens require at least, the largest at most."""
    count = state.get("count") if isinstance(state, dict) else None
    is_count = isinstance(count, Tensor) and count.dim() == 1 and count.dtype == torch.int64
    counts, most = counts_of(count, keeps_largest=False) if is_count else None, largest(chunk_size, s)
    least = Sizes(0, 0, 0) if counts is None else after(counts, chunk_size, s, keeps_chunk_before)
    base = most if counts is None else least
    sizes = {"slots": base.slots, "block": base.block, "sums": base.sums}  # torch 2.6 does not compile _replace
    for name, field in _FIELDS.items():
        entry = state.get(name) if isinstance(state, dict) else None
        given = entry.shape[2] if isinstance(entry, Tensor) and entry.dim() == 4 else -1
        # A sum has all of its rows or none.
        if least.of(name) <= given <= most.of(name) and (name != "sum_kv" or given in (0, s)):
            sizes[field] = given
    return Sizes(**sizes)
