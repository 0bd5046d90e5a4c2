"""Attention to a window of tokens and to the first tokens of a sequence, whole and from a state.

Legend: B batch, H heads, n tokens, d channels of q and k, e channels of v, w tokens of a window, g global tokens.

The state holds the keys and values of at most w last tokens, newest last, and of the first g tokens. The mechanism
determines which of the last are still visible: all in a sliding window, those of the current chunk in chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import check_masks, check_query_key_value
from .held_tokens import held_length, last_tokens, unless_padding, with_next
from .padding import invert, real_first, take, zero_padding
from .precision import autocast_off, compute_dtype
from .state import State, check_continuation, state_of_sums, zero_state
from .window_softmax import (
    Window,
    as_they_came,
    first_tokens,
    hide,
    own_chunk,
    real_tokens_first,
    sliding_window,
    softmax_over_all,
    split_blocks,
    sums_of_all,
    window_softmax,
)


class WindowOptions(NamedTuple):
    """The options that determine, in addition to causality, which tokens see each other."""

    window: int  # w
    chunked: bool  # each token sees its own chunk of w tokens, in place of the w around it
    global_tokens: int  # g


def attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: WindowOptions,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    initial_state: State | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, State]:
    """Self-attention with ``options``: (B, H, n, e) in v's dtype, and the next state with ``return_state``.

    The state is ``count`` (B,), ``k`` (B, H, L, d) and ``v`` (B, H, L, e) of the last L <= w tokens, and
    with global tokens ``global_k`` (B, H, G, d) and ``global_v`` (B, H, G, e) of the first G <= g, in float32.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state without ``causal``.
    """
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    held = held_length(initial_state, "k", options.window)
    first = held_length(initial_state, "global_k", options.global_tokens) if options.global_tokens else None
    shapes = _state_shapes(k, v, held, first)
    state = state_of_sums(initial_state, shapes, compute_dtype(q), q)
    with autocast_off(q):
        if state is None and not return_state:
            return _whole(q, k, v, key_padding_mask, query_padding_mask, options, causal)
        dtype, out_dtype = compute_dtype(q), v.dtype
        q = zero_padding(zero_padding(q.to(dtype) * q.shape[3] ** -0.5, key_padding_mask), query_padding_mask)
        k, v = zero_padding(k.to(dtype), key_padding_mask), zero_padding(v.to(dtype), key_padding_mask)
        state = zero_state(shapes, dtype, q.device) if state is None else state
        out, state = (_step if q.shape[2] == 1 else _several)(q, k, v, key_padding_mask, options, state)
        out = zero_padding(zero_padding(out, key_padding_mask), query_padding_mask).to(out_dtype)
    return (out, state) if return_state else out


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: WindowOptions,
    causal: bool,
) -> Tensor:
    """The outputs (B, H, n, e) of a whole sequence, in v's dtype."""
    tokens = real_tokens_first(q, k, v, key_padding_mask, query_padding_mask)
    n, count = q.shape[2], options.global_tokens
    window = _window(options, causal, n)
    if count == 0:
        out, _ = window_softmax(tokens.q, tokens.k, tokens.v, tokens.seen, window, None)
    else:
        first_k, first_v = first_tokens(tokens.k, count), first_tokens(tokens.v, count)
        first_seen = first_tokens(tokens.seen, count).transpose(-2, -1)  # (B or 1, 1, 1, g)
        position = torch.arange(n, device=q.device).unsqueeze(1)  # (n, 1)
        if causal:
            first_seen = first_seen & (torch.arange(count, device=q.device) <= position)
        seen = tokens.seen & (position >= count)
        out = _window_and_first(tokens.q, tokens.k, tokens.v, seen, window, first_k, first_v, first_seen)
        if not causal:
            over_all = softmax_over_all(first_tokens(tokens.q, count), tokens.k, tokens.v, tokens.seen)
            out = torch.where(position < count, F.pad(over_all, [0, 0, 0, n])[:, :, :n], out)
    return as_they_came(out, tokens, key_padding_mask, query_padding_mask).to(v.dtype)


def _window(options: WindowOptions, causal: bool, n: int) -> Window:
    if options.chunked:
        return own_chunk(options.window, causal, n)
    if causal:
        return sliding_window(options.window - 1, 0, n)
    return sliding_window(options.window // 2, (options.window - 1) // 2, n)


def _window_and_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    window: Window,
    first_k: Tensor,
    first_v: Tensor,
    first_seen: Tensor,
) -> Tensor:
    """Attention to a window and to the g first tokens (B, H, g, channels), which ``seen`` excludes from the window.

    ``first_seen`` is bool (B or 1, 1, n or 1, g).
    """
    further = hide(q @ first_k.transpose(-2, -1), first_seen)  # (B, H, n, g)
    out, weights = window_softmax(q, k, v, seen, window, split_blocks(further, window.size))
    return out + sums_of_all(weights, first_v, q.shape[2])


def _state_shapes(k: Tensor, v: Tensor, held: int, first: int | None) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state that holds the last ``held`` tokens and, if any, the ``first`` tokens."""
    shapes = {"count": (k.shape[0],)}
    for name, x in (("k", k), ("v", v)):
        shapes[name] = (*x.shape[:2], held, x.shape[3])
        if first is not None:
            shapes[f"global_{name}"] = (*x.shape[:2], first, x.shape[3])
    return shapes


def _held(count: Tensor, options: WindowOptions) -> Tensor:
    """Number (B,) of cached tokens visible to the next one after ``count`` (B,) tokens, before the limit of w."""
    return count % options.window if options.chunked else count


def _with_room(state: State, options: WindowOptions, n: int) -> State:
    """``state`` with empty slots for those of the next ``n`` tokens that may be among the first g of a sequence."""
    if not options.global_tokens:
        return state
    held = state["global_k"].shape[2]
    room = (0, 0, 0, min(options.global_tokens, held + n) - held)
    return {name: F.pad(x, room) if name.startswith("global_") else x for name, x in state.items()}


def _step(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, options: WindowOptions, state: State
) -> tuple[Tensor, State]:
    """One token after ``state``: its output (B, H, 1, e) and the next state; O((L + g) (d + e))."""
    count = state["count"].unsqueeze(1)  # (B, 1)
    keys, values = (with_next(state[name], x, options.window) for name, x in (("k", k), ("v", v)))
    size = keys.shape[2]
    slot = torch.arange(size, device=q.device)
    new = {"count": state["count"] + 1, "k": keys, "v": values}
    state = _with_room(state, options, 1)
    seen = slot >= size - 1 - _held(count, options)  # (B, L)
    if options.global_tokens:
        first = torch.arange(state["global_k"].shape[2], device=q.device)
        here = (first == count)[:, None, :, None]
        new["global_k"] = torch.where(here, k, state["global_k"])
        new["global_v"] = torch.where(here, v, state["global_v"])
        seen = seen & (count - (size - 1) + slot >= options.global_tokens)  # the others are visible as first tokens
        seen = torch.cat([seen, first <= count], dim=1)
        keys, values = torch.cat([keys, new["global_k"]], dim=2), torch.cat([values, new["global_v"]], dim=2)
    out = softmax_over_all(q, keys, values, seen[:, None, :, None])
    return out, unless_padding(padding_mask, state, new)


def _several(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, options: WindowOptions, state: State
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as one sequence with the held tokens: outputs (B, H, n, e) and the next state."""
    size, n, count = state["k"].shape[2], q.shape[2], state["count"].unsqueeze(1)  # (B, 1)
    if padding_mask is None:
        padding_mask = torch.zeros(q.shape[0], n, dtype=torch.bool, device=q.device)
    held = _held(count, options).clamp(max=size)
    unused = torch.arange(size, device=q.device) < size - held
    padding = torch.cat([unused, padding_mask], dim=1)  # (B, L + n)
    order = real_first(padding)
    q = take(F.pad(q, (0, 0, size, 0)), order)  # the state holds no queries: their outputs are not needed
    k, v = (take(torch.cat([state[name], x], dim=2), order) for name, x in (("k", k), ("v", v)))
    real = (~padding).sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(size + n, device=q.device)
    seen, window = place < real, _window(options, True, size + n)
    new = {"count": state["count"] + (~padding_mask).sum(1)}
    if options.global_tokens:
        state = _with_room(state, options, n)
        most = state["global_k"].shape[2]  # G
        first, position = torch.arange(most, device=q.device), place + count - held  # (B, L + n)
        # The first tokens are in the state, or among the new ones, which begin at ``held``.
        index = torch.where(first < count, first, most + held + first - count).clamp(max=most + size + n - 1)
        there = (first < new["count"].unsqueeze(1))[:, None, :, None]
        for name, x in (("k", k), ("v", v)):
            known = torch.cat([state[f"global_{name}"], x], dim=2)
            new[f"global_{name}"] = take(known, index).masked_fill(~there, 0.0)
        first_seen = (first <= position.unsqueeze(2)).unsqueeze(1)  # (B, 1, L + n, G)
        seen = (seen & (position >= options.global_tokens))[:, None, :, None]
        out = _window_and_first(q, k, v, seen, window, new["global_k"], new["global_v"], first_seen)
    else:
        out, _ = window_softmax(q, k, v, seen[:, None, :, None], window, None)
    out = take(out, invert(order))[:, :, size:]
    size = min(options.window, size + n)
    return out, {**new, "k": last_tokens(k, real, size), "v": last_tokens(v, real, size)}
