"""The state of causal LoLCATs: at most w last keys and values, and the sums over all earlier tokens.

Sums have no features while the state holds fewer than w tokens, since there are no earlier tokens then.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.feature_sums import state_shapes as shapes_of_sums
from ..shared.held_tokens import last_tokens, with_next
from ..shared.padding import invert, real_first, take
from ..shared.state import State, zero_state
from ..shared.window_softmax import hide, sliding_window
from .full import Maps, far_before, near, window_weights


def state_shapes(k: Tensor, v: Tensor, held: int, window: int, features: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state that holds the last ``held`` tokens, for k (B, H, n, d), v (B, H, n, e)."""
    last = {name: (*x.shape[:2], held, x.shape[3]) for name, x in (("k", k), ("v", v))}
    return {"count": (k.shape[0],), **last, **shapes_of_sums(features if held == window else 0, v)}


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: Maps,
    share: Tensor,
    window: int,
    padding_mask: Tensor | None,
    chunk_size: int,
    shapes: dict[str, tuple[int, ...]],
    state: State | None,
) -> tuple[Tensor, State]:
    """The outputs (B, H, n, e) of the next tokens and the state after them; q, k and v are 0 at padding (B, n).

    ``shapes`` are the shapes of ``state``.
    """
    if state is None:
        state = zero_state(shapes, q.dtype, q.device)
    if q.shape[2] == 1 and padding_mask is None:
        return _step(q, k, v, maps, share, window, state)
    return _several(q, k, v, maps, share, window, padding_mask, chunk_size, state)


def _step(
    q: Tensor, k: Tensor, v: Tensor, maps: Maps, share: Tensor, window: int, state: State
) -> tuple[Tensor, State]:
    """The output (B, H, 1, e) of one real token after ``state``, and the new state.

    O((L + f) (d + e)) if the state holds L tokens.
    """
    count, sums, is_full = state["count"] + 1, {}, state["k"].shape[2] == window
    keys, values = (with_next(state[name], x, window) for name, x in (("k", k), ("v", v)))
    size = keys.shape[2]
    seen = torch.arange(size, device=q.device) >= size - count.unsqueeze(1)  # (B, L)
    scores = hide(q * q.shape[3] ** -0.5 @ keys.transpose(-2, -1), seen[:, None, None])  # (B, H, 1, L)
    weights = window_weights(scores, share)
    total, normaliser = weights @ values, weights.sum(-1, keepdim=True)
    if is_full:
        # The oldest token of the window becomes far; its slot is empty until there are w tokens.
        leaving = maps.of_keys(state["k"][:, :, :1]) * (state["count"] >= window).view(-1, 1, 1, 1)
        sum_k = state["sum_k"] + leaving.squeeze(2)
        sum_kv = torch.addcmul(state["sum_kv"], leaving.transpose(-2, -1), state["v"][:, :, :1])
        queries = maps.of_queries(q)
        total = total + queries @ sum_kv
        normaliser = normaliser + (queries * sum_k.unsqueeze(2)).sum(-1, keepdim=True)
        sums = {"sum_k": sum_k, "sum_kv": sum_kv}
    else:
        sums = _no_sums(state, maps, size == window)
    return total / normaliser, {"count": count, "k": keys, "v": values, **sums}


def _no_sums(state: State, maps: Maps, is_full: bool) -> State:
    """Empty sums: with all features if the window ``is_full`` from now on, otherwise without features."""
    features = maps.number_of_features() if is_full else 0
    vectors = state["v"].new_zeros(*state["v"].shape[:2], features)
    return {"sum_k": vectors, "sum_kv": vectors.unsqueeze(-1).expand(*vectors.shape, state["v"].shape[3]).contiguous()}


def _several(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: Maps,
    share: Tensor,
    window: int,
    padding_mask: Tensor | None,
    chunk_size: int,
    state: State,
) -> tuple[Tensor, State]:
    """The outputs (B, H, n, e) of the tokens after ``state``, and the new state.

    They are computed as a sequence that begins with the window of the state.
    """
    n, held_count = q.shape[2], state["k"].shape[2]
    if padding_mask is None:
        padding_mask = torch.zeros(q.shape[0], n, dtype=torch.bool, device=q.device)
    unused = torch.arange(held_count, device=q.device) < held_count - state["count"].unsqueeze(1)
    padding = torch.cat([unused, padding_mask], dim=1)  # (B, L + n)
    order = real_first(padding)
    q = take(F.pad(q, (0, 0, held_count, 0)), order)  # the state holds no queries: their outputs are not needed
    k, v = (take(torch.cat([state[name], x], dim=2), order) for name, x in (("k", k), ("v", v)))
    real = (~padding).sum(1, keepdim=True)  # (B, 1)
    values, weights = near(q, k, v, sliding_window(window - 1, 0, held_count + n), share, real)
    size = min(window, held_count + n)
    if size == window:
        before = {name: state[name] for name in ("sum_k", "sum_kv")} if held_count == window else None
        features = maps.of_queries(q), maps.of_keys(k)
        far_values, far_weights, sums = far_before(*features, v, window, chunk_size, before, real, maps.precision)
        values, weights = values + far_values, weights + far_weights
    else:
        sums = _no_sums(state, maps, False)
    out = take(values / weights, invert(order))[:, :, held_count:]
    last = {name: last_tokens(x, real, size) for name, x in (("k", k), ("v", v))}
    return out, {"count": state["count"] + (~padding_mask).sum(1), **last, **sums}
