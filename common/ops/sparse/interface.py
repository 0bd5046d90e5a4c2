"""Sparse Transformer: softmax over near tokens and over some far tokens, in the fixed or the strided pattern.

Child, Gray, Radford, Sutskever, *Generating Long Sequences with Sparse Transformers*, 2019, section 4.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import real_positions, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation
from ..shared.window_softmax import (
    Tokens,
    Window,
    as_they_came,
    hide,
    join_blocks,
    own_chunk,
    real_tokens_first,
    scores_of_all,
    split_blocks,
    sums_of_all,
    window_softmax,
)
from .pattern import PATTERNS, Pattern, sees


@takes_segments("q", "k", "v")
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: str = "fixed",
    stride: int,
    columns: int = 1,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """softmax(q·k / √d) v over some tokens for each query, with l = ``stride`` and c = ``columns``.

    ``fixed``: the query's own chunk of l tokens, and the last c tokens of every other chunk. ``strided``: the tokens
    less than l away, and those a multiple of l away. Causal, only tokens up to the query. Every head has both parts
    under one normaliser, the paper's "merged head". q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype.
    Masks: bool (B, n), True = padding; chunks and distances count real keys, and a token that is padding, as a key or
    as a query, gives 0. Cost: O(n (l + c n / l) (d + e)) time and O(n (l + c n / l)) memory, c = 1 when strided: n √n
    for l near √n. ``initial_state`` and ``return_state`` (causal) continue a sequence: the state holds all keys and
    values, ``k`` (B, H, m, d), ``v`` (B, H, m, e), and ``padding_mask`` (B, m).

    The paper only has causal attention. So does the Long Range Arena, which also classifies with it; in its code the
    first token of each chunk is visible too. Not causal, the patterns here are the same in both directions.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name, number or state that does not fit, or a state without ``causal``.
    """
    check_choice("pattern", pattern, PATTERNS)
    check_positive_int("stride", stride)
    check_positive_int("columns", columns)
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    options = Pattern(pattern, stride, columns)
    with autocast_off(q):
        if not return_state and initial_state is None:
            return _whole(q, k, v, key_padding_mask, query_padding_mask, options, causal)
        k, v = zero_padding(k, key_padding_mask), zero_padding(v, key_padding_mask)
        state = extend_kv_cache({"k": k, "v": v}, key_padding_mask, initial_state)
        out = _extend(q, state, query_padding_mask, options).to(v.dtype)
    return (out, state) if return_state else out


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    pattern: Pattern,
    causal: bool,
) -> Tensor:
    """The outputs (B, H, n, e) of a whole sequence, in v's dtype."""
    tokens = real_tokens_first(q, k, v, key_padding_mask, query_padding_mask)
    stride = pattern.stride
    if not torch.compiler.is_compiling():
        stride = min(stride, q.shape[2])  # a shorter sequence is seen completely, whatever the stride
    out = (
        _fixed(tokens, stride, pattern.columns, causal) if pattern.name == "fixed" else _strided(tokens, stride, causal)
    )
    return as_they_came(out, tokens, key_padding_mask, query_padding_mask).to(v.dtype)


def _fixed(tokens: Tokens, stride: int, columns: int, causal: bool) -> Tensor:
    """The query's own chunk as a window, and the columns of all chunks, which are the same for all queries."""
    columns = min(columns, stride)
    q, seen = split_blocks(tokens.q, stride), split_blocks(tokens.seen, stride)  # (B, H, G, l, d), (B or 1, 1, G, l, 1)
    k_columns = split_blocks(tokens.k, stride)[:, :, :, stride - columns :].flatten(2, 3)  # (B, H, G c, d)
    v_columns = split_blocks(tokens.v, stride)[:, :, :, stride - columns :].flatten(2, 3)
    chunk = torch.arange(q.shape[2], device=q.device).unsqueeze(1)  # (G, 1)
    elsewhere = chunk.transpose(0, 1) < chunk if causal else chunk.transpose(0, 1) != chunk  # (G, G)
    # Each column has the mask of its chunk: (B or 1, 1, G, 1, G c)
    there = seen[:, :, :, stride - columns :].flatten(2).unsqueeze(2)  # (B or 1, 1, 1, G c)
    visible = (elsewhere.repeat_interleave(columns, dim=1) & there).unsqueeze(3)
    further = hide(scores_of_all(q, k_columns), visible)
    window = own_chunk(stride, causal, tokens.q.shape[2])
    out, weights = window_softmax(tokens.q, tokens.k, tokens.v, tokens.seen, window, further)
    return out + sums_of_all(weights, v_columns, tokens.q.shape[2])


def _strided(tokens: Tokens, stride: int, causal: bool) -> Tensor:
    """A window, and the tokens a multiple of l away: in rows of l tokens, those of the same column."""
    q, k, v, seen = (
        split_blocks(tokens.q, stride).transpose(2, 3),  # (B, H, l, G, d)
        split_blocks(tokens.k, stride).transpose(2, 3),
        split_blocks(tokens.v, stride).transpose(2, 3),
        split_blocks(tokens.seen, stride).transpose(2, 3),  # (B or 1, 1, l, G, 1)
    )
    row = torch.arange(q.shape[3], device=q.device)
    elsewhere = row < row.unsqueeze(1) if causal else row != row.unsqueeze(1)  # (G, G)
    further = hide(q @ k.transpose(-2, -1), seen.transpose(-2, -1) & elsewhere)  # (B, H, l, G, G)
    window = Window(stride - 1, 0 if causal else stride - 1, stride, 1, 0 if causal else 1)
    further = further.transpose(2, 3)  # (B, H, G, l, G): l queries of each row, and rows of keys
    out, weights = window_softmax(tokens.q, tokens.k, tokens.v, tokens.seen, window, further)
    return out + join_blocks((weights.transpose(2, 3) @ v).transpose(2, 3), tokens.q.shape[2])


def _extend(q: Tensor, state: State, query_padding_mask: Tensor | None, pattern: Pattern) -> Tensor:
    """The outputs (B, H, n, e) of the last n of the m tokens in ``state``; O(m √m) for l near √m."""
    n, m, padding = q.shape[2], state["k"].shape[2], state["padding_mask"]
    dtype = compute_dtype(q)
    k, v = state["k"].to(dtype), state["v"].to(dtype)
    q = zero_padding(zero_padding(q.to(dtype), padding[:, m - n :]), query_padding_mask)
    if n > pattern.stride:
        # A map of so many queries and all keys would be too large. Earlier tokens need no queries.
        before = (0, 0, m - n, 0)
        out = _whole(F.pad(q, before), k, v, padding, None, pattern, True)[:, :, m - n :]
        return zero_padding(out, query_padding_mask)
    position = real_positions(padding)  # (B, m)
    i, j = position[:, m - n :, None], position[:, None]
    visible = (sees(i, j, pattern) & (j <= i) & ~padding[:, None]).unsqueeze(1)  # (B, 1, n, m)
    out = hide(q @ k.transpose(-2, -1) * q.shape[3] ** -0.5, visible).softmax(-1) @ v
    return zero_padding(zero_padding(out, padding[:, m - n :]), query_padding_mask)
