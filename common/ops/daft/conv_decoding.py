"""Causal DAFT-conv from a state: one step, several tokens at once.

The state holds the keys and values of the last L <= ``window`` tokens, and one weighted mean over all earlier tokens.
"""

import torch
from torch import Tensor

from ..shared.held_tokens import last_tokens, unless_padding, with_next
from ..shared.padding import invert, real_first, take
from ..shared.state import State, zero_state
from .conv_causal import attend_in_chunks, convolve
from .weighted_means import WeightedMean, empty_log_weight, merge


def state_shapes(v: Tensor, held: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state, for v (B, h, n, c), that holds the last ``held`` tokens."""
    batch, heads, _, channels = v.shape
    return {
        "count": (batch,),
        "k": (batch, heads, held),
        "v": (batch, heads, held, channels),
        "mean": (batch, heads, channels),
        "log_weight": (batch, heads),
    }


def empty_state(v: Tensor, shapes: dict[str, tuple[int, ...]]) -> State:
    """The state of ``shapes`` before the first token."""
    state = zero_state(shapes, v.dtype, v.device)
    state["log_weight"].fill_(empty_log_weight())
    return state


def step(
    k: Tensor, v: Tensor, r: Tensor, padding_mask: Tensor | None, state: State, local_only: bool
) -> tuple[Tensor, State]:
    """One token after ``state``: its output (B, h, 1, c) and the next state; O(window d)."""
    window = r.shape[1]
    before = WeightedMean(state["mean"], state["log_weight"].unsqueeze(-1))
    count = state["count"][:, None]
    if not local_only and state["k"].shape[2] == window:
        leaving = (count >= window).unsqueeze(2)  # (B, 1, 1): the oldest slot holds a token
        oldest = state["k"][:, :, :1].masked_fill(~leaving, empty_log_weight())
        before = merge(WeightedMean(state["v"][:, :, 0], oldest), before)
    keys, values = with_next(state["k"], k, window), with_next(state["v"], v, window)
    size = keys.shape[2]
    missing = torch.arange(size - 1, -1, -1, device=k.device) > count  # (B, L)
    logits = (keys + r[:, window - size :]).masked_fill(missing[:, None], -torch.inf)  # (B, h, L)
    log_weight = logits.logsumexp(-1, keepdim=True)
    mean = ((logits - log_weight).exp().unsqueeze(2) @ values).squeeze(2)  # (B, h, c)
    out = torch.lerp(mean, before.mean, torch.sigmoid(before.log_weight - log_weight))  # ``merge`` without the weight
    new = {"count": state["count"] + 1, "k": keys, "v": values, "mean": before.mean}
    new["log_weight"] = before.log_weight.squeeze(-1)
    return out.unsqueeze(2), unless_padding(padding_mask, state, new)


def several(
    k: Tensor, v: Tensor, r: Tensor, padding_mask: Tensor | None, state: State, local_only: bool
) -> tuple[Tensor, State]:
    """T tokens after ``state``, as one sequence with its window: outputs (B, h, T, c) and the next state."""
    batch, window, tokens, slots = k.shape[0], r.shape[1], k.shape[2], state["k"].shape[2]
    if padding_mask is None:
        padding_mask = torch.zeros(batch, tokens, dtype=torch.bool, device=k.device)
    unused = torch.arange(slots, device=k.device) < slots - state["count"][:, None]  # (B, L): empty slots
    padding = torch.cat([unused, padding_mask], dim=1)
    order = real_first(padding)
    k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
    k, v = take(k.unsqueeze(-1), order).squeeze(-1), take(v, order)
    initial = WeightedMean(state["mean"], state["log_weight"].unsqueeze(-1))
    out = convolve(k, v, r, padding.gather(1, order), True) if local_only else attend_in_chunks(k, v, r, initial)
    out = take(out, invert(order))[:, :, slots:]
    real = (~padding).sum(1)  # (B,)
    last = last_tokens(torch.cat([k.unsqueeze(-1), v], dim=-1), real[:, None], min(window, slots + tokens))
    before = initial
    if not local_only:
        leaving = torch.arange(k.shape[2], device=k.device) < (real - window)[:, None]  # (B, L + T)
        logits = k.masked_fill(~leaving[:, None], empty_log_weight())
        mean = (logits.softmax(-1).unsqueeze(2) @ v).squeeze(2)  # (B, h, c)
        before = merge(WeightedMean(mean, logits.logsumexp(-1, keepdim=True)), initial)
    new = {"count": state["count"] + (~padding_mask).sum(1), "k": last[..., 0], "v": last[..., 1:]}
    return out, {**new, "mean": before.mean, "log_weight": before.log_weight.squeeze(-1)}
