"""Packed documents: unpack each document into a row of its own, run the op, pack the outputs again.

It is exact for every mechanism, causal or not. Documents of about the same length share a call, so that little is
padding. Legend: B rows, n tokens, H heads, c channels, L tokens of the longest document of a call.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import shape_of
from .relative_bias import check_bias, cut_bias
from .segments import SEGMENT, Documents, find_documents, without_segment
from .state import State, joined_entries
from .tracing import may_be_exported

#: Cost of an additional call, in tokens.
_CALL = 128
#: Inputs without channels, and their dimension of tokens.
_WITHOUT_CHANNELS = {"log_decay": 2, "log_gate": 2, "beta": 2}
_MASKS = ("key_padding_mask", "query_padding_mask")

#: ``call(masks, state, **tokens)`` on rows -> output, or output and state.
Call = Callable[..., Any]


def by_document(
    op: Callable,
    names: tuple[str, ...],
    arguments: dict[str, Any],
    segment_ids: Tensor,
    has_bias: bool,
) -> Any:
    """``op`` of ``arguments``, document by document; the arguments ``names`` are tokens."""
    arguments = {name: x for name, x in arguments.items() if name != "segment_ids"}
    inputs = {name: arguments.pop(name) for name in names}
    tokens = {name: x for name, x in inputs.items() if x is not None}
    masks = {name: arguments.pop(name) for name in _MASKS if name in arguments}
    decodes = "return_state" in arguments
    state, return_state = arguments.pop("initial_state", None), arguments.pop("return_state", False)
    if not _is_one_sequence(tokens, masks):
        op(**inputs, **masks, **arguments)  # reports what does not fit
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tokens.items())
        raise ValueError(f"segment_ids is given with {shapes}; allowed: queries and keys of the same tokens")
    if not arguments.get("causal") and sum(x is None for x in masks.values()) == 1 and len(masks) == 2:
        raise ValueError("one padding mask is given alone with segment_ids; allowed without causal=True: both or none")
    bias, tokens_so_far = arguments.get("bias") if has_bias else None, _length(tokens) + _tokens_of(state)
    first = next(iter(tokens.values()))
    check_bias(bias, tokens_so_far, first.shape[1] if first.dim() == 4 else 1, first, "tokens and those of the state")

    def call(masks: dict[str, Tensor | None], state: State | None, **some: Tensor) -> Any:
        more = {"initial_state": state, "return_state": return_state} if decodes else {}
        if bias is not None:
            more["bias"] = cut_bias(bias, tokens_so_far, _length(some) + _tokens_of(state))
        return op(**{**inputs, **some}, **masks, **{**arguments, **more})

    causal = bool(arguments.get("causal"))
    return attend_by_document(call, tokens, segment_ids, masks, causal, state, return_state)


def _length(tokens: dict[str, Tensor]) -> int:
    """The number of tokens of each row."""
    name, x = next(iter(tokens.items()))
    return x.shape[_token_dim(name, x)]


def _tokens_of(state: State | None) -> int:
    """The number of tokens of a state that holds all tokens."""
    return state["padding_mask"].shape[1] if isinstance(state, dict) and "padding_mask" in state else 0


def attend_by_document(
    call: Call,
    tokens: dict[str, Tensor],
    segment_ids: Tensor,
    masks: dict[str, Tensor | None],
    causal: bool,
    state: State | None = None,
    return_state: bool = False,
) -> Any:
    """``call(masks, state, **tokens)`` with each document as a row; the output (B, H, n, e) or (B, n, e), packed again.

    ``tokens`` are (B, H, n, c) or (B, n, c) each, or (B, H, n) for the names in ``_WITHOUT_CHANNELS``. ``masks`` are
    the masks that ``call`` accepts, (B, n) with True = padding, or None; tokens that all of them hide are omitted. A
    shorter document is filled by repeating its last token. ``call`` gets masks that hide the filling, unless it is
    ``causal`` without masks, when no token sees later ones anyway.
    ``state``, with its entry ``segment_id``, belongs to the documents that continue; with ``return_state`` the new
    state follows the output. O(size of the tokens) in addition to the calls, which have at most about twice the tokens.

    Raises:
        ValueError: ``segment_ids`` or ``state`` do not fit; under torch.export.
    """
    if may_be_exported():
        raise ValueError("segment_ids is given; allowed in torch.export: None, since the lengths of documents are data")
    # Not as a decorator: importing this file would then import the compiler, which takes a second.
    run = torch.compiler.disable(_eager) if torch.compiler.is_compiling() else _eager
    return run(call, tokens, segment_ids, masks, causal, state, return_state)


def _eager(
    call: Call,
    tokens: dict[str, Tensor],
    segment_ids: Tensor,
    masks: dict[str, Tensor | None],
    causal: bool,
    state: State | None,
    return_state: bool,
) -> Any:
    like = next(iter(tokens.values()))
    key_mask = masks.get("key_padding_mask")
    documents = find_documents(segment_ids, key_mask, state, like)
    _check_state(state, len(segment_ids))
    inner = without_segment(state)
    same_row = bool((documents.ids == documents.ids[:, :1]).all())
    if same_row and (inner is None or bool(documents.goes_on.all())):
        result = call(masks, inner, **tokens)
        return (result[0], {**result[1], SEGMENT: documents.last}) if return_state else result
    layout = _lay_out(documents, _kept(masks, segment_ids), inner is not None, return_state)
    rows = {name: _Rows(x, _token_dim(name, x), layout) for name, x in tokens.items()}
    hidden = {name: None if x is None else _Rows(x, 1, layout, fill=True) for name, x in masks.items()}
    hides = not causal or return_state or any(x is not None for x in masks.values())
    outs, states = [], []
    for part in layout.parts:
        filler = _filler(part, segment_ids.device) if hides else None
        some_masks = {name: _mask(x, part, filler) for name, x in hidden.items()}
        some_state = None if not part.goes_on else {name: x[part.row] for name, x in inner.items()}
        result = call(some_masks, some_state, **{name: x.of(part) for name, x in rows.items()})
        out, after = result if return_state else (result, None)
        outs.append(out.transpose(1, -2).flatten(0, 1) if out.dim() == 4 else out.flatten(0, 1))
        states.append(after)
    out = _taken(torch.cat(outs), layout.slots)  # (B n, ...)
    out = out.unflatten(0, tuple(segment_ids.shape))
    out = out.transpose(1, 2) if out.dim() == 4 else out
    return (out, {**_joined(layout, states), SEGMENT: documents.last}) if return_state else out


class _Part(NamedTuple):
    """Documents that share a call."""

    begin: int  # its first place among the places of all parts
    length: int  # L
    row: Tensor  # row of the batch, for each document
    lengths: Tensor  # length of each document
    goes_on: bool  # whether they continue from the state
    last: Tensor  # bool: the last document of its row


class _Layout(NamedTuple):
    """The places of tokens. All parts are concatenated, (documents, L) each."""

    parts: list[_Part]
    tokens: Tensor  # index among all B n of the token at each place; after the end of a document, its last token
    filler: Tensor  # bool: the place is after the end of a document
    slots: Tensor  # the place of each of the B n tokens; -1 for an omitted token


def _lay_out(documents: Documents, kept: Tensor, has_state: bool, return_state: bool) -> _Layout:
    """The parts of documents for the tokens that are ``kept`` (B, n)."""
    batch, n = kept.shape
    token = kept.flatten().nonzero().squeeze(1)
    row, ids = token // n, documents.ids.flatten()[token]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = (row[1:] != row[:-1]) | (ids[1:] != ids[:-1])
    run = first.cumsum(0) - 1
    starts = first.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(token)]))
    run_row, goes_on = row[starts], documents.goes_on.flatten()[token[starts]]
    if return_state:  # rows without a token have a state too
        empty = (kept.sum(1) == 0).nonzero().squeeze(1)
        lengths, run_row = torch.cat([lengths, torch.zeros_like(empty)]), torch.cat([run_row, empty])
        goes_on = torch.cat([goes_on, torch.full_like(empty, has_state, dtype=torch.bool)])
    last = torch.zeros_like(goes_on)
    order = torch.arange(len(run_row), device=run_row.device)
    last[torch.zeros(batch, dtype=torch.long, device=row.device).scatter_reduce(0, run_row, order, "amax")] = True
    parts, begins, end = [], torch.zeros_like(lengths), 0
    for continues, members, length in _grouped(lengths.tolist(), goes_on.tolist()):
        index = torch.tensor(members, device=row.device)
        parts.append(_Part(end, length, run_row[index], lengths[index], continues, last[index]))
        begins[index] = end + length * torch.arange(len(members), device=row.device)
        end += len(members) * length
    slot = begins[run] + torch.arange(len(token), device=row.device) - starts[run]
    slots = row.new_full((batch * n,), -1).scatter(0, token, slot)
    filler = torch.ones(end, dtype=torch.bool, device=row.device).scatter(0, slot, False)
    # Tokens of a document are in order, so the last token so far has the largest index; a document without tokens is
    # filled with the first token of all.
    tokens = row.new_zeros(end).scatter(0, slot, token)
    pieces = [tokens[part.begin : part.begin + len(part.row) * part.length].view(-1, part.length) for part in parts]
    tokens = torch.cat([piece.cummax(1).values.flatten() for piece in pieces])
    return _Layout(parts, tokens, filler, slots)


def _grouped(lengths: list[int], goes_on: list[bool]) -> Iterator[tuple[bool, list[int], int]]:
    """Groups of document indices for one call, with the longest length; continued documents are grouped apart."""
    for continues in (True, False):
        group, tokens = [], 0
        for i in sorted((i for i, x in enumerate(goes_on) if x == continues), key=lengths.__getitem__):
            padding = lengths[i] * len(group) - tokens
            if group and padding > max(_CALL, tokens // 10):
                yield continues, group, max(1, lengths[group[-1]])
                group, tokens = [], 0
            group.append(i)
            tokens += lengths[i]
        if group:
            yield continues, group, max(1, lengths[group[-1]])


class _Rows:
    """Tokens at their places, from which the rows of each part are taken."""

    def __init__(self, x: Tensor, dim: int, layout: _Layout, fill: bool = False) -> None:
        self.heads_first = dim == 2
        x = x.transpose(1, 2) if self.heads_first else x  # (B, n, ...)
        x = x.reshape(-1, *x.shape[2:])
        if fill:
            self.places = x[layout.tokens] | layout.filler
        else:
            self.places = x.index_select(0, layout.tokens)

    def of(self, part: _Part) -> Tensor:
        """The rows of a part, (documents, ..., L, ...)."""
        x = self.places[part.begin : part.begin + len(part.row) * part.length].unflatten(0, (-1, part.length))
        return x.transpose(1, 2) if self.heads_first else x


def _taken(x: Tensor, source: Tensor) -> Tensor:
    """x[source], with zeros where ``source`` is -1."""
    missing = source < 0
    if not bool(missing.any()):
        return x.index_select(0, source)
    return x.index_select(0, source.clamp(min=0)).masked_fill(missing.view(-1, *[1] * (x.dim() - 1)), 0)


def _kept(masks: dict[str, Tensor | None], segment_ids: Tensor) -> Tensor:
    """Tokens (B, n) that at least one mask shows."""
    if not masks or any(x is None for x in masks.values()):
        return torch.ones_like(segment_ids, dtype=torch.bool)
    hidden, *others = masks.values()
    for other in others:
        hidden = hidden & other
    return ~hidden


def _filler(part: _Part, device: torch.device) -> Tensor | None:
    """Bool (documents, L), True after the end of each; None if all are equally long."""
    filler = torch.arange(part.length, device=device) >= part.lengths[:, None]
    return filler if bool(filler.any()) else None


def _mask(hidden: _Rows | None, part: _Part, filler: Tensor | None) -> Tensor | None:
    return filler if hidden is None else hidden.of(part)


def _joined(layout: _Layout, states: list[State]) -> State:
    """The states of the last documents, in the order of the rows."""
    row = torch.cat([part.row[part.last] for part in layout.parts])
    order = torch.empty_like(row).scatter(0, row, torch.arange(len(row), device=row.device))
    joined = {}
    for name in states[0]:
        entries = [state[name][part.last] for part, state in zip(layout.parts, states)]
        joined[name] = joined_entries(name, entries).index_select(0, order)
    return joined


def _token_dim(name: str, x: Tensor) -> int:
    return _WITHOUT_CHANNELS.get(name, x.dim() - 2)


def _is_one_sequence(tokens: dict[str, Any], masks: dict[str, Any]) -> bool:
    """Whether all inputs have the same batch and number of tokens."""
    sizes = set()
    for name, x in tokens.items():
        if not isinstance(x, Tensor) or x.dim() not in (3, 4) or _token_dim(name, x) not in (1, 2):
            return False
        sizes.add((x.shape[0], x.shape[_token_dim(name, x)]))
    for x in masks.values():
        if x is not None:
            if not isinstance(x, Tensor) or x.dtype != torch.bool or x.dim() != 2:
                return False
            sizes.add(tuple(x.shape))
    return len(sizes) == 1 and 0 not in next(iter(sizes)) and len({x.device for x in tokens.values()}) == 1


def _check_state(state: State | None, batch: int) -> None:
    """Raise ValueError unless each entry of ``state`` has ``batch`` rows; the function itself checks the rest."""
    for name, x in (state or {}).items():
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != batch:
            raise ValueError(
                f"initial_state[{name!r}] is {shape_of(x)}; allowed: a tensor whose first dimension is {batch}"
            )
