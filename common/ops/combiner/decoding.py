"""Causal Combiner from a state: the entries of the state, one step, several tokens at once.

The state holds q, k, v and x of the tokens of each sequence's last row while that row is not full, and the summaries of
all rows before it. The sequences of a batch may have different lengths. They are aligned at the end of the tensors: the
entries before the tokens of a shorter row, and before the summaries of fewer rows, are arbitrary.

Legend, in addition to that of the folder: W tokens of the longest last row, S = R times the largest number of full
rows, D width of the tokens x, F = W + n tokens of the last row and the new tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..shared.checks import ArgumentError
from ..shared.padding import invert, real_first, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.score_kernels import masked_softmax
from ..shared.state import State, check_state
from .rows import Earlier, attend_rows

#: The entries of the tokens and of the summaries.
_TOKENS = ("q", "k", "v", "x")
_SUMMARIES = ("summary_k", "summary_v")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: ``summarise(tokens, positions, padding_mask)`` -> summary_k (B, H, n, d) and summary_v (B, H, n, e) of whole rows.
Summarise = Callable[[State, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def state_before(tokens: State, row_length: int, state: State | None) -> State:
    """``state``, checked, or the initial state if it is None; ``tokens`` are the next q, k, v and x (B, 1, n, D).

    Raises:
        ValueError: ``state`` does not fit, or has rows of another length.
    """
    if state is None:
        empty = {name: x[:, :, :0] for name, x in tokens.items()}
        summaries = dict(zip(_SUMMARIES, (empty["k"], empty["v"])))
        count = torch.zeros(len(tokens["q"]), dtype=torch.long, device=tokens["q"].device)
        return {"count": count, **empty, **summaries}
    width, summaries = _length(state, "q"), _length(state, "summary_k")
    shapes = {name: (*x.shape[:2], width, x.shape[3]) for name, x in tokens.items()}
    shapes |= {name: (*tokens[x].shape[:2], summaries, tokens[x].shape[3]) for name, x in zip(_SUMMARIES, "kv")}
    check_state(state, {"count": (len(tokens["q"]),), **shapes}, _DTYPES, tokens["q"])
    most = max(_counts(state), default=0)
    full = most - most % row_length
    if width >= row_length or summaries % row_length or full > summaries:
        raise ArgumentError(
            f"`initial_state` is of {most} tokens, {width} of them in a row that is not full, and of {summaries} "
            f"summaries; allowed: the state of a Combiner with `row_length`={row_length}"
        )
    return state


def _length(state: State, name: str) -> int:
    """Number of tokens of an entry; 0 for an entry without that dimension, which ``check_state`` reports."""
    entry = state.get(name) if isinstance(state, dict) else None
    return entry.shape[2] if isinstance(entry, Tensor) and entry.dim() == 4 else 0


def _counts(state: State) -> list[int]:
    """The number of tokens of each sequence; on the meta device, which has no values, as many as the state can hold."""
    if state["count"].is_meta:
        return [_length(state, "q") + _length(state, "summary_k")] * len(state["count"])
    return state["count"].tolist()


def _cut(state: State, row_length: int, counts: list[int]) -> State:
    """``state`` without entries that none of its sequences needs; it may come from a batch with longer sequences."""
    longest = max((count % row_length for count in counts), default=0)
    full = max((count // row_length * row_length for count in counts), default=0)
    wanted = {**dict.fromkeys(_TOKENS, longest), **dict.fromkeys(_SUMMARIES, full)}
    if all(state[name].shape[2] == size for name, size in wanted.items()):
        return state
    return {**state, **{name: state[name][:, :, state[name].shape[2] - size :] for name, size in wanted.items()}}


def extend(
    tokens: State, padding_mask: Tensor | None, row_length: int, summarise: Summarise, state: State
) -> tuple[Tensor, State]:
    """The outputs (B, H, n, e) of the next tokens, arbitrary at padding, and the state after them.

    ``tokens`` are q, k (rotated), v and x, and ``state`` is the result of ``state_before``, whose token counts are read
    on the host. One token costs O((R + n / R) d), or O(R (R + n / R) d + R D²) if it fills a row; copying the state is
    O(R D) per token and O(n D) per row.
    """
    counts = _counts(state)
    state = _cut(state, row_length, counts)
    columns = [count % row_length for count in counts]
    if tokens["q"].shape[2] == 1 and padding_mask is None and max(columns, default=0) + 1 < row_length:
        with autocast_off(tokens["q"]):
            return _step(tokens, row_length, counts, state)
    return _several(tokens, padding_mask, row_length, counts, summarise, state)


def _step(tokens: State, row_length: int, counts: list[int], state: State) -> tuple[Tensor, State]:
    """One token per sequence, for tokens that do not fill their rows."""
    rows = {name: torch.cat([state[name], x], dim=2) for name, x in tokens.items()}
    width, groups = rows["q"].shape[2], state["summary_k"].shape[2] // row_length
    summaries = (state[name].unflatten(2, (groups, row_length)) for name in _SUMMARIES)  # (B, H, G, R, c)
    if len(set(counts)) == 1:
        column = counts[0] % row_length
        columns = [x[:, :, :, column] for x in summaries]
        hidden = None if (column + 1, counts[0] // row_length) == (width, groups) else state["count"][:1]
    else:
        index = (state["count"] % row_length)[:, None, None, None, None]
        columns = [x.gather(3, index.expand(-1, *x.shape[1:3], 1, x.shape[4])).squeeze(3) for x in summaries]
        hidden = state["count"]
    dtype = compute_dtype(tokens["q"])
    keys, values = ([in_dtype(x, dtype) for x in pair] for pair in ((rows["k"], columns[0]), (rows["v"], columns[1])))
    q = in_dtype(tokens["q"], dtype) * tokens["q"].shape[3] ** -0.5
    scores = torch.cat([q @ x.transpose(-2, -1) for x in keys], dim=3)  # (B, H, 1, W + 1 + G)
    if hidden is not None:
        hidden = _hidden_places(hidden, row_length, width, groups)[:, None, None]
    near, far = masked_softmax(scores, hidden).split([width, groups], dim=3)
    return near @ values[0] + far @ values[1], {**state, **rows, "count": state["count"] + 1}


def _hidden_places(count: Tensor, row_length: int, width: int, groups: int) -> Tensor:
    """True for tokens of the last row (with the next token), and for earlier rows, that a sequence does not have.

    ``count`` (B,) tokens before the next -> bool (B, W + 1 + G).
    """
    places, rows = (torch.arange(size, 0, -1, device=count.device) for size in (width, groups))
    return torch.cat([places > (count % row_length + 1)[:, None], rows > (count // row_length)[:, None]], dim=1)


def _several(
    tokens: State,
    padding_mask: Tensor | None,
    row_length: int,
    counts: list[int],
    summarise: Summarise,
    state: State,
) -> tuple[Tensor, State]:
    """The outputs (B, H, n, e) of tokens, computed as a sequence that begins with the last row of the state."""
    width, n = state["q"].shape[2], tokens["q"].shape[2]
    row_count = state["count"] % row_length  # (B,)
    new = [n] * len(counts) if padding_mask is None or padding_mask.is_meta else (~padding_mask).sum(1).tolist()
    totals = [count % row_length + added for count, added in zip(counts, new)]
    padding = None
    if padding_mask is not None or any(count % row_length != width for count in counts):
        before = torch.arange(width, 0, -1, device=row_count.device) > row_count[:, None]
        after = before.new_zeros(len(counts), n) if padding_mask is None else padding_mask
        padding = torch.cat([before, after], dim=1)  # (B, F)
    joined = {name: zero_padding(torch.cat([state[name], x], dim=2), padding) for name, x in tokens.items()}
    order = real_first(padding)
    joined = {name: take(x, order) for name, x in joined.items()}  # real tokens first
    padding = None if padding is None else padding.gather(1, order)
    frame = {name: in_dtype(x, tokens["q"].dtype) for name, x in joined.items()}
    positions = (state["count"] - row_count)[:, None] + torch.arange(width + n, device=row_count.device)
    summaries = summarise(frame, positions[:, None], padding)
    groups = state["summary_k"].shape[2] // row_length
    lacking = torch.arange(groups, 0, -1, device=row_count.device) > (state["count"] // row_length)[:, None]
    earlier = Earlier(state["summary_k"], state["summary_v"], lacking) if groups else None
    with autocast_off(tokens["q"]):
        out = attend_rows(frame["q"], frame["k"], frame["v"], *summaries, row_length, True, padding, earlier)
    out = (out if order is None else take(out, invert(order)))[:, :, width:]
    longest = max((total % row_length for total in totals), default=0)
    rows = {name: _before(x, totals, longest) for name, x in joined.items()}
    full, seen = [total // row_length * row_length for total in totals], state["summary_k"].shape[2]
    most = max((count // row_length * row_length + added for count, added in zip(counts, full)), default=0)
    next_summaries = {
        name: _before(torch.cat([state[name], x], dim=2), [seen + added for added in full], most)
        for name, x in zip(_SUMMARIES, summaries)
    }
    real = state["count"].new_tensor(new)
    return out, {"count": state["count"] + real, **rows, **next_summaries}


def _before(x: Tensor, ends: list[int], size: int) -> Tensor:
    """The ``size`` tokens of x (B, H, m, c) before position ``ends[b]`` of each sequence: (B, H, size, c).

    If there are fewer, the first token is repeated in their places.
    """
    if len(set(ends)) == 1 and ends[0] >= size:
        return x[:, :, ends[0] - size : ends[0]]
    places = torch.tensor(ends, dtype=torch.long, device=x.device)[:, None] - size + torch.arange(size, device=x.device)
    return take(x, places.clamp(min=0))
