"""Packed documents: several documents one after the other in a row, which do not see each other.

``segment_ids`` (B, n) are integers that identify the document of each token. Along a row the ids of real tokens never
decrease; the ids of padding are ignored. Legend: B rows, n tokens, H heads, c channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .state import State, state_entry

#: The entry of a state with the id of each row's document, (B,).
SEGMENT = "segment_id"
#: The id of no document: before the first real token of a row.
_NONE = torch.iinfo(torch.int64).min


class Documents(NamedTuple):
    """The document of each token, and the position of the token in it."""

    ids: Tensor  # (B, n), int64; a padded token has the id of the real token before it
    places: Tensor  # (B, n): number of earlier real tokens of the same document in this call
    goes_on: Tensor  # (B, n), bool: the document began before this call
    count: Tensor  # (B,): real tokens of the last document in this call
    last: Tensor  # (B,): the id of the last document
    last_goes_on: Tensor  # (B,), bool: it began before this call

    def positions(self, before: Tensor | None = None) -> Tensor:
        """The number of real tokens of its document before each token, (B, n).

        ``before`` (B,) counts the real tokens of earlier calls, in the document of the state.
        """
        return self.places if before is None else self.places + before[:, None] * self.goes_on

    def counts(self, before: Tensor | None = None) -> Tensor:
        """The number of real tokens of the last document so far, (B,)."""
        return self.count if before is None else self.count + before * self.last_goes_on


def find_documents(segment_ids: Tensor, padding_mask: Tensor | None, state: State | None, like: Tensor) -> Documents:
    """The documents of ``segment_ids`` (B, n), after those of ``state``; O(B n).

    ``padding_mask`` (B, n), True = padding. ``like`` (B, ..., n, c) are the tokens.

    Raises:
        ValueError: ``segment_ids`` are not integers (B, n) on the device of ``like``, or decrease; ``state`` is not a
            state of packed documents.
    """
    _check_ids(segment_ids, like)
    if state is None:
        last = segment_ids.new_full((len(segment_ids),), _NONE, dtype=torch.int64)
    else:
        last = state_entry(state, SEGMENT, 1, like)
    given, real = segment_ids.long(), None if padding_mask is None else ~padding_mask
    ids = given if real is None else given.where(real, last[:, None])
    ids = torch.maximum(ids, last[:, None]).cummax(1).values
    _check_order(given, ids, real)
    first = ids != torch.cat([last[:, None], ids[:, :-1]], dim=1)
    ones = torch.ones_like(ids) if real is None else real.long()
    before = ones.cumsum(1) - ones  # real tokens before each, in this call
    places = before - before.where(first, 0).cummax(1).values
    goes_on = ids == last[:, None] if state is not None else torch.zeros_like(first)
    count = (ones * (ids == ids[:, -1:])).sum(1)
    return Documents(ids, places, goes_on, count, ids[:, -1], goes_on[:, -1])


def documents_by_eos(tokens: Tensor, eos: int, causal: bool, before: Tensor | None = None) -> Tensor:
    """Document ids (B, n) of the input ``tokens`` (B, n) of a model whose documents each end with ``eos``.

    In a language model, tokens are shifted by one: the first token of a document is predicted at the eos that ended the
    previous one, so a document begins *at* an eos. In a masked model it begins *after* one. ``before`` (B,) is the id
    of the document so far.
    """
    ends = tokens.eq(eos).long()
    ids = ends.cumsum(1) if causal else ends.cumsum(1) - ends
    return ids if before is None else before[:, None] + ids


def without_segment(state: State | None) -> State | None:
    """``state`` without ``SEGMENT``, for a function of one document per row."""
    return None if state is None else {name: x for name, x in state.items() if name != SEGMENT}


def _check_ids(segment_ids: Tensor, like: Tensor) -> None:
    expected = (like.shape[0], like.shape[-2])
    if not isinstance(segment_ids, Tensor):
        raise ValueError(
            f"segment_ids is a {type(segment_ids).__name__}; allowed: a tensor (batch, tokens) = {expected}"
        )
    if segment_ids.is_floating_point() or segment_ids.is_complex() or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; allowed: integers")
    if tuple(segment_ids.shape) != expected:
        raise ValueError(f"segment_ids has shape {tuple(segment_ids.shape)}; allowed: (batch, tokens) = {expected}")
    if segment_ids.device != like.device:
        raise ValueError(f"segment_ids is on {segment_ids.device}; allowed: the device of the input, {like.device}")


def _check_order(given: Tensor, ids: Tensor, real: Tensor | None) -> None:
    """Raise ValueError if a real token's id is smaller than an earlier id, which ``ids`` then has in its place."""
    if torch.compiler.is_compiling() or given.is_meta:  # where tensors have no values
        return
    back = given != ids if real is None else (given != ids) & real
    if back.any():
        row, token = (int(x) for x in back.nonzero()[0])
        raise ValueError(
            f"segment_ids has {int(given[row, token])} after {int(ids[row, token])}, in row {row} at token {token}; "
            "allowed: ids that never decrease along a row and its state"
        )
