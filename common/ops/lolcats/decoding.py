"""The state after some tokens: the last w keys and values as they are, and the sums over all before them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.feature_sums import state_shapes as shapes_of_sums
from ..shared.padding import invert, real_first, take
from ..shared.state import State
from ..shared.window_softmax import hide, sliding_window
from .full import Maps, far_before, near, window_weights


def state_shapes(k: Tensor, v: Tensor, window: int, features: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state, for k (B, H, n, d) and v (B, H, n, e)."""
    last = {name: (*x.shape[:2], window, x.shape[3]) for name, x in (("k", k), ("v", v))}
    return {"count": (k.shape[0],), **last, **shapes_of_sums(features, v)}


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: Maps,
    share: Tensor,
    window: int,
    padding_mask: Tensor | None,
    chunk_size: int,
    state: State | None,
) -> tuple[Tensor, State]:
    """The next tokens' outputs (B, H, n, e) and the state after them; q, k and v are 0 at padding (B, n)."""
    if state is None:
        features = maps.of_keys(k[:, :, :1]).shape[3]
        shapes = state_shapes(k, v, window, features)
        state = {name: torch.zeros(shape, dtype=q.dtype, device=q.device) for name, shape in shapes.items()}
        state["count"] = state["count"].long()
    if q.shape[2] == 1 and padding_mask is None:
        return _step(q, k, v, maps, share, window, state)
    return _several(q, k, v, maps, share, window, padding_mask, chunk_size, state)


def _step(
    q: Tensor, k: Tensor, v: Tensor, maps: Maps, share: Tensor, window: int, state: State
) -> tuple[Tensor, State]:
    """One token after ``state``, not padding; O((w + f) (d + e))."""
    # The oldest of the window becomes far; before there are w tokens, its slot is empty.
    leaving = maps.of_keys(state["k"][:, :, :1]) * (state["count"] >= window).view(-1, 1, 1, 1)
    sum_k = state["sum_k"] + leaving.squeeze(2)
    sum_kv = torch.addcmul(state["sum_kv"], leaving.transpose(-2, -1), state["v"][:, :, :1])
    keys, values = (torch.cat([state[name][:, :, 1:], x], dim=2) for name, x in (("k", k), ("v", v)))
    count = state["count"] + 1
    seen = torch.arange(window, device=q.device) >= window - count.unsqueeze(1)  # (B, w)
    scores = hide(q * q.shape[3] ** -0.5 @ keys.transpose(-2, -1), seen[:, None, None])  # (B, H, 1, w)
    weights = window_weights(scores, share)
    queries = maps.of_queries(q)
    total = weights @ values + queries @ sum_kv
    normaliser = weights.sum(-1, keepdim=True) + (queries * sum_k.unsqueeze(2)).sum(-1, keepdim=True)
    return total / normaliser, {"count": count, "k": keys, "v": values, "sum_k": sum_k, "sum_kv": sum_kv}


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
    """n tokens after ``state``, as a sequence of the window that it holds and them."""
    n = q.shape[2]
    if padding_mask is None:
        padding_mask = torch.zeros(q.shape[0], n, dtype=torch.bool, device=q.device)
    unused = torch.arange(window, device=q.device) < window - state["count"].clamp(max=window).unsqueeze(1)
    padding = torch.cat([unused, padding_mask], dim=1)  # (B, w + n)
    order = real_first(padding)
    q = take(F.pad(q, (0, 0, window, 0)), order)  # the state holds no queries, and needs none
    k, v = (take(torch.cat([state[name], x], dim=2), order) for name, x in (("k", k), ("v", v)))
    real = (~padding).sum(1, keepdim=True)  # (B, 1)
    sums = {name: state[name] for name in ("sum_k", "sum_kv")}
    far_values, far_weights, sums = far_before(maps.of_queries(q), maps.of_keys(k), v, window, chunk_size, sums, real)
    near_values, near_weights = near(q, k, v, sliding_window(window - 1, 0, window + n), share, real)
    out = take((near_values + far_values) / (near_weights + far_weights), invert(order))[:, :, window:]
    last = real - window + torch.arange(window, device=q.device)  # (B, w): before the first token where negative
    held = {
        name: take(x, last.clamp(min=0)).masked_fill((last < 0)[:, None, :, None], 0.0)
        for name, x in (("k", k), ("v", v))
    }
    return out, {"count": state["count"] + (~padding_mask).sum(1), **held, **sums}
