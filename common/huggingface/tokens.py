"""Padding, positions and documents of the tokens of a call, which every layer of a model needs.

Legend: B rows, n tokens. Masks of this project are bool and True at padding; transformers' are 1 at real tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.shared.segments import SEGMENT, find_documents
from ..ops.shared.state import State
from ..ops.shared.tracing import runs_eagerly

#: The base of fingerprints, of which all powers modulo 2^64 differ: the multiplier of Knuth's generator MMIX.
_BASE = 6364136223846793005
_NOTHING_READ = {"read": 0, "first": -1, "fingerprint": 0}
#: Names in the state of positions of every cache; with documents, there is also ``document``.
SEEN = {"count", *_NOTHING_READ}


class Tokens(NamedTuple):
    """The tokens of one call."""

    padding_mask: Tensor | None  # (B, n), True = padding; None if there is none
    places: Tensor  # (B, n), int64: the number of real tokens of its document before each token
    segment_ids: Tensor | None  # (B, n), the document of each token; None for one document per row
    seen: State  # the state of positions after these tokens; see ``LineartimeCache.seen``


def read_padding(input_ids: Tensor, attention_mask: Tensor | None, pad: int) -> Tensor | None:
    """The padding of ``input_ids`` (B, n), bool with True = padding; None if there is none.

    ``attention_mask`` is transformers', (B, m) with m >= n, whose last n columns are of these tokens: 1, or True, at
    real ones. The token ``pad`` is padding in any case, as in fairseq.

    Raises:
        ValueError: a mask of another shape, or with other values.
    """
    padding = input_ids.eq(pad)
    if attention_mask is not None:
        rows, n = input_ids.shape
        if attention_mask.dim() != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < n:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: (batch, tokens) = {(rows, n)}, or "
                "more tokens than that, which came before"
            )
        padding = padding | is_padding(attention_mask[:, attention_mask.shape[1] - n :])
    return hidden_or_none(padding)


def is_padding(attention_mask: Tensor) -> Tensor:
    """A mask of transformers, of any dtype, as bool: True, padding, where it is 0.

    Raises:
        ValueError: values other than 0 and 1, as far as they can be read: an additive mask has 0 at real tokens.
    """
    padding = attention_mask == 0
    if attention_mask.dtype != torch.bool and runs_eagerly(attention_mask):
        others = ~padding & (attention_mask != 1)
        if bool(others.any()):
            value = attention_mask[others][0].item()
            raise ValueError(f"attention_mask has the value {value}; allowed: 1 at real tokens and 0 at padding")
    return padding


def hidden_or_none(padding_mask: Tensor) -> Tensor | None:
    """``padding_mask``, bool with True = padding, or None if it hides nothing, as far as that can be read.

    On a GPU this waits for the device once a call, as fairseq does; attention without a mask is faster.
    """
    return padding_mask if not runs_eagerly(padding_mask) or bool(padding_mask.any()) else None


def read_tokens(
    input_ids: Tensor, padding_mask: Tensor | None, segment_ids: Tensor | None = None, seen: State | None = None
) -> Tokens:
    """The tokens ``input_ids`` (B, n) after those of ``seen``, which is empty or None at the beginning; O(B n).

    ``segment_ids`` (B, n), which never decrease along a row, number the documents of the tokens.

    Raises:
        ValueError: the tokens before had no documents although these have, or the reverse.
    """
    seen = seen or {}
    if seen and ("document" in seen) != (segment_ids is not None):
        had = "several documents per row" if "document" in seen else "one document per row"
        raise ValueError(f"the cache is of {had}; allowed: to go on in the same way")
    before = seen.get("count")
    if segment_ids is None:
        real = torch.ones_like(input_ids) if padding_mask is None else (~padding_mask).long()
        sums = real.cumsum(1)
        places = sums - real if before is None else before[:, None] + sums - real
        count = sums[:, -1] if before is None else before + sums[:, -1]
        return Tokens(padding_mask, places, None, {"count": count})
    state = {SEGMENT: seen["document"]} if seen else None
    documents = find_documents(segment_ids, padding_mask, state, input_ids.unsqueeze(-1))
    seen = {"count": documents.counts(before), "document": documents.last}
    return Tokens(padding_mask, documents.positions(before), documents.ids, seen)


def fingerprint(input_ids: Tensor, real: Tensor, seen: State | None = None) -> State:
    """The number and a fingerprint of the real tokens of each row up to here, of constant size; O(B n).

    ``input_ids`` (B, n) come after those of ``seen``; ``real`` (B, n) is True at real tokens. Returns ``read`` (B,),
    the number of real tokens, ``first`` (B,), the first of them or -1, and ``fingerprint`` (B,), a polynomial of them
    modulo 2^64, by which rows of the same number are the same, up to chance.
    """
    seen = seen or {name: torch.full_like(input_ids[:, 0], value) for name, value in _NOTHING_READ.items()}
    real = real.long()
    powers = torch.full_like(input_ids[:1, :1], _BASE).repeat(1, input_ids.shape[1]).cumprod(1)[0]  # modulo 2^64
    powers = torch.cat([torch.ones_like(powers[:1]), powers])
    number = real.sum(1)
    later = (number[:, None] - real.cumsum(1)).clamp(min=0)  # real tokens after each
    first = input_ids.gather(1, real.argmax(1, keepdim=True))[:, 0]
    return {
        "read": seen["read"] + number,
        "first": torch.where((seen["read"] == 0) & (number > 0), first, seen["first"]),
        "fingerprint": seen["fingerprint"] * powers[number] + (real * (input_ids + 1) * powers[later]).sum(1),
    }


def compare_with_read(input_ids: Tensor, real: Tensor, seen: State) -> tuple[Tensor, Tensor, Tensor]:
    """Compare texts ``input_ids`` (B, n) with the tokens that a cache has ``seen``; ``real`` as in ``fingerprint``.

    Returns whether each row begins with all of them (B,), whether it has the same first token (B,), and which of its
    real tokens come after as many as were read (B, n).
    """
    before = real & (real.long().cumsum(1) <= seen["read"][:, None])
    begin = fingerprint(input_ids, before)
    begins = (begin["read"] == seen["read"]) & (begin["fingerprint"] == seen["fingerprint"])
    return begins, (begin["first"] == seen["first"]) & (seen["read"] > 0), real & ~before


def documents_by_position(position_ids: Tensor, padding_mask: Tensor | None, seen: State) -> Tensor | None:
    """Document ids (B, n) of tokens with ``position_ids`` (B, n), which begin anew at 0 in each document.

    ``seen`` is the state of positions before them. None if rows have one document each, as far as that can be read.
    """
    if seen and "document" not in seen:
        return None
    begins = position_ids.eq(0) if padding_mask is None else position_ids.eq(0) & ~padding_mask
    ids = begins.long().cumsum(1)
    if seen:
        return seen["document"][:, None] + ids
    return None if runs_eagerly(ids) and int(ids.max()) <= 1 else ids


def check_positions(position_ids: Tensor, tokens: Tokens) -> None:
    """Raise ValueError unless ``position_ids`` (B, n) are the positions of ``tokens``, as the model counts them."""
    if not runs_eagerly(position_ids):
        return
    differs = position_ids != tokens.places
    if tokens.padding_mask is not None:
        differs = differs & ~tokens.padding_mask
    if bool(differs.any()):
        row, token = (int(x) for x in differs.nonzero()[0])
        raise ValueError(
            f"position_ids is {int(position_ids[row, token])} in row {row} at token {token}; allowed: "
            f"{int(tokens.places[row, token])}, since positions count the real tokens of each document from 0"
        )
