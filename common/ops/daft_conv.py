"""DAFT-conv: attention without dot products, by key and by distance inside a window, global outside of it.

*A Dot Product Attention Free Transformer*, equations 7-9.
"""

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from .alignment import invert, put_back, real_first, take
from .checks import State, check_gate_key_value, check_padding_mask, check_state
from .chunks import autocast_off, compute_dtype, zero_padding
from .weighted_means import WeightedMean, empty_log_weight, merge, running_merge

#: Tokens of a block of the causal form, between which every weight is written out.
_BLOCK = 16
#: Up to this product of a window and the channels of a head the causal form convolves directly. Measured on one CPU
#: core on 2026-11-20, forward and backward in seconds, d = 512, direct against blocks of 16: window 64 at T = 4096 with
#: 1, 2, 4, 8 channels 0.38/1.23, 0.24/0.59, 0.19/0.27, 0.86/0.13; window 256 at T = 3072 with 1, 2, 4 channels
#: 0.69/0.89, 0.91/0.41, 1.06/0.28. By FFT it is as fast, but then its error is relative to the largest key of all.
_DIRECT = 256


def daft_conv(
    q: Optional[Tensor],
    k: Tensor,
    v: Tensor,
    r: Tensor,
    *,
    causal: bool = False,
    spatial_shape: Optional[Sequence[int]] = None,
    key_padding_mask: Optional[Tensor] = None,
    local_only: bool = False,
    initial_state: Optional[State] = None,
    return_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, State]]:
    """sigmoid(q) ⊙ Σ exp(k_t' + w_tt') v_t' / Σ exp(k_t' + w_tt'), w the filter r in a window and 0 outside (Eq. 7-9).

    B batch, T tokens, d channels, h heads, each with one key per token and d / h channels of v: q and v (B, T, d), k
    (B, T, h) -> (B, T, d) in v's dtype; q None leaves the sigmoid out (Table 8). Filters: r (h, window), or (h, kh, kw)
    for T tokens that are the raster of ``spatial_shape`` (H, W), whatever its size. Centred ones are odd and r[:, j]
    weighs the token at t + j - window // 2; a causal one ends with the token itself, r[:, -1 - j] weighs the one j
    back, and nothing looks ahead. ``key_padding_mask``: bool (B, T), True = padding, on any side; positions in a
    sequence count real tokens, places in an image are what they are, and a padded token gives 0. ``local_only``: w is
    -inf outside of the window, which is all that a token then sees (Figure 2's ablation). Cost: O(T window d) time,
    O(T d) memory. Exponentials are taken relative to maxima over what a token sees, or in float64.

    ``initial_state`` and ``return_state`` (causal) continue a sequence. The state does not grow: ``count`` (B,) real
    tokens so far, ``k`` (B, h, window) and ``v`` (B, h, window, d / h) of the last of them, newest last, and of all
    before them ``mean`` (B, h, d / h) and ``log_weight`` (B, h): the quotient of the two sums, the second's logarithm,
    which stay those of no token with ``local_only``.

    Raises:
        ValueError: a shape, dtype, mask or state that does not fit; heads that do not divide d; an even window that is
            not causal; a ``spatial_shape`` of a causal sequence, without a 2-D filter or not of T tokens; a state
            without ``causal``.
    """
    _check(q, k, v, r, causal, spatial_shape, key_padding_mask)
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")
    dtype, heads = compute_dtype(v), k.shape[2]
    keys = zero_padding(k.to(dtype).unsqueeze(1), key_padding_mask).squeeze(1)
    values = zero_padding(v.to(dtype).unsqueeze(1), key_padding_mask).squeeze(1)
    keys, values = keys.transpose(1, 2), values.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, h, T), (B, h, T, c)
    state = None
    with autocast_off(v):
        filters = r.to(dtype)
        if initial_state is not None:
            shapes = {name: x.shape for name, x in _empty_state(keys, values, filters).items()}
            check_state(initial_state, shapes, dtype, v)
        if not causal:
            out = _centred(keys, values, filters, spatial_shape, key_padding_mask, local_only)
        elif initial_state is None and not return_state:
            out = _causal(keys, values, filters, key_padding_mask, local_only)
        else:
            state = _empty_state(keys, values, filters) if initial_state is None else initial_state
            continued = _step if v.shape[1] == 1 else _continued
            out, state = continued(keys, values, filters, key_padding_mask, state, local_only)
        out = zero_padding(out, key_padding_mask).transpose(1, 2).flatten(2)  # (B, h, T, c) -> (B, T, d)
        out = out if q is None else torch.sigmoid(q.to(dtype)) * out
    out = zero_padding(out.unsqueeze(1), key_padding_mask).squeeze(1).to(v.dtype)
    return (out, state) if return_state else out


def _check(
    q: Optional[Tensor],
    k: Tensor,
    v: Tensor,
    r: Tensor,
    causal: bool,
    shape: Optional[Sequence[int]],
    padding_mask: Optional[Tensor],
) -> None:
    """Raise ValueError for anything but the state."""
    if not isinstance(r, Tensor) or r.dim() not in (2, 3) or not r.is_floating_point() or 0 in r.shape:
        given = f"{tuple(r.shape)}, {r.dtype}" if isinstance(r, Tensor) else type(r).__name__
        raise ValueError(f"r is {given}; allowed: floating point (heads, window) or (heads, height, width)")
    heads = r.shape[0]
    check_gate_key_value(q, k, v, key_channels=heads)
    if r.device != v.device:
        raise ValueError(f"r is on {r.device}; allowed: the device of the input, {v.device}")
    if v.shape[2] % heads:
        raise ValueError(f"r has {heads} heads; allowed: a divisor of the channels, {v.shape[2]}")
    if not causal and any(size % 2 == 0 for size in r.shape[1:]):
        raise ValueError(f"r has the window {tuple(r.shape[1:])}; allowed when not causal: odd sizes")
    if (shape is None) != (r.dim() == 2) or (causal and shape is not None):
        raise ValueError(
            f"spatial_shape is {shape} with r of shape {tuple(r.shape)} and causal={causal}; allowed: (height, width) "
            "with r of three dimensions and causal=False, or None with r of two"
        )
    if shape is not None and (len(shape) != 2 or shape[0] * shape[1] != v.shape[1]):
        raise ValueError(f"spatial_shape is {tuple(shape)}; allowed: (height, width) of {v.shape[1]} tokens")
    check_padding_mask("key_padding_mask", padding_mask, v.unsqueeze(1))


def _centred(
    k: Tensor,
    v: Tensor,
    r: Tensor,
    shape: Optional[Sequence[int]],
    padding_mask: Optional[Tensor],
    local_only: bool,
) -> Tensor:
    """A sequence or an image as a whole: a depthwise convolution with exp(r) - 1, and the sums over everything.

    ``local_only``: the convolution alone, with exp(r).
    """
    batch, heads, tokens, channels = v.shape
    order, padding = None, padding_mask
    if shape is None and padding_mask is not None:  # a sequence's positions count real tokens, an image's stand
        order = real_first(padding_mask)
        k, v = take(k.unsqueeze(-1), order).squeeze(-1), take(v, order)
        padding = padding_mask.gather(1, order)
    largest = k if padding is None else k.masked_fill(padding[:, None], torch.finfo(k.dtype).min)
    relative = k - largest.detach().amax(2, keepdim=True)
    # The largest key of all may be outside of a window: float64 holds keys 600 below it, as in ``_direct``.
    weight = torch.exp(relative.double() if local_only else relative)
    weight = (weight if padding is None else weight.masked_fill(padding[:, None], 0.0)).unsqueeze(-1)  # (B, h, T, 1)
    terms = torch.cat([weight * v, weight], dim=3)  # (B, h, T, c + 1): of both sums
    # exp(r) may overflow, and what it is divided by cancels as well.
    over = r.detach().flatten(1).amax(1).view(-1, *[1] * (r.dim() - 1)).to(terms.dtype)
    over = over if local_only else over.clamp(min=0.0)
    filters = torch.exp(r - over) if local_only else torch.exp(r - over) - torch.exp(-over)
    maps = terms.permute(0, 3, 1, 2).flatten(0, 1)  # (B (c + 1), h, T)
    if shape is None:
        near = F.conv1d(maps, filters.unsqueeze(1), padding=r.shape[1] // 2, groups=heads)
    else:
        maps = maps.unflatten(2, tuple(shape))  # (B (c + 1), h, H, W)
        same = (r.shape[1] // 2, r.shape[2] // 2)
        near = F.conv2d(maps, filters.unsqueeze(1), padding=same, groups=heads).flatten(2)
    sums = near.unflatten(0, (batch, channels + 1)).permute(0, 2, 3, 1)  # (B, h, T, c + 1)
    if not local_only:
        sums = sums + torch.exp(-over).view(-1, 1, 1) * terms.sum(2, keepdim=True)
    tiny = torch.finfo(sums.dtype).tiny  # of rows that are padding alone
    return put_back((sums[..., :-1] / sums[..., -1:].clamp(min=tiny)).to(v.dtype), order)


def _causal(k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], local_only: bool) -> Tensor:
    """A causal sequence as a whole: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    order = real_first(padding_mask)
    k, v = take(k.unsqueeze(-1), order).squeeze(-1), take(v, order)
    # The padding stands behind the real tokens now: none that matters sees it.
    direct = local_only or v.shape[3] * r.shape[1] <= _DIRECT
    return put_back(_direct(k, v, r, local_only) if direct else _blocked(k, v, r, None), order)


def _direct(k: Tensor, v: Tensor, r: Tensor, local_only: bool) -> Tensor:
    """A depthwise convolution with exp(r) and, unless ``local_only``, a running sum of what is behind, in float64.

    Everything is relative to the largest key of all, which may come later: float64 holds keys 600 below it.
    """
    batch, channels, window = v.shape[0], v.shape[3], r.shape[1]
    weight = torch.exp((k - k.detach().amax(2, keepdim=True)).double()).unsqueeze(-1)  # (B, h, T, 1)
    terms = torch.cat([weight * v, weight], dim=3).permute(0, 3, 1, 2).flatten(0, 1)  # (B (c + 1), h, T)
    over = r.detach().amax(1, keepdim=True).double()  # (h, 1): exp(r) may overflow
    over = over if local_only else over.clamp(min=0.0)
    filters = torch.exp(r.double() - over).unsqueeze(1)
    sums = F.conv1d(F.pad(terms, (window - 1, 0)), filters, groups=r.shape[0])
    if not local_only:
        sums = sums + F.pad(terms, (window, 0))[:, :, : terms.shape[2]].cumsum(2) * torch.exp(-over)
    sums = sums.unflatten(0, (batch, channels + 1))  # (B, c + 1, h, T)
    mean = sums[:, :-1] / sums[:, -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    return mean.permute(0, 2, 3, 1).to(v.dtype)


class _Blocks(NamedTuple):
    """Keys and values in blocks of b tokens, blocks of the whole batch side by side for products with (h, b, b)."""

    k: Tensor  # (h, b, B, G)
    v: Tensor  # (h, b, B, G, c)


def _blocked(k: Tensor, v: Tensor, r: Tensor, initial: Optional[WeightedMean]) -> Tensor:
    """Blocks of b tokens: pairs inside a block, Toeplitz products with the blocks a window reaches, sums before them.

    ``initial`` (B, h, c), (B, h, 1) is of what came before the first token, outside of every window.
    """
    tokens, window = k.shape[2], r.shape[1]
    size = min(_BLOCK, tokens)
    missing = -tokens % size
    blocks = _Blocks(
        F.pad(k, (0, missing)).unflatten(2, (-1, size)).permute(1, 3, 0, 2),
        F.pad(v, (0, 0, 0, missing)).unflatten(2, (-1, size)).permute(1, 3, 0, 2, 4),
    )
    reach = -(-(window - 1) // size)  # how many blocks back a window may look
    largest = blocks.k.detach().amax(1)  # (h, B, G)
    weight = torch.exp(blocks.k - largest[:, None]).unsqueeze(-1)  # (h, b, B, G, 1)
    terms = torch.cat([weight * blocks.v, weight], dim=-1)  # (h, b, B, G, c + 1)
    parts = [_inside(blocks, r), _before(terms, largest, reach, initial)]
    groups = terms.shape[3]
    if min(reach, groups - 1) > 0:
        parts.append(_window(terms, largest, r, min(reach, groups - 1)))
    out = parts[0]
    for part in parts[1:]:
        out = merge(part, out)
    # (h, b, B, G, c) -> (B, h, G b, c)
    return out.mean.permute(2, 0, 3, 1, 4).flatten(2, 3)[:, :, :tokens]


def _distance_weights(r: Tensor, size: int, lag: int) -> Tensor:
    """r between the tokens of a block and those ``lag`` blocks before, 0 outside of the window: (h, b, b)."""
    place = torch.arange(size, device=r.device)
    distance = lag * size + place[:, None] - place  # (b, b)
    index = r.shape[1] - 1 - distance
    inside = (distance >= 0) & (index >= 0)
    return r[:, index.clamp(0, r.shape[1] - 1)].masked_fill(~inside, 0.0)


def _inside(blocks: _Blocks, r: Tensor) -> WeightedMean:
    """Each token over its block up to itself, pair by pair: no key ahead takes part in a maximum."""
    size = blocks.k.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=r.device).triu(1)
    bias = _distance_weights(r, size, 0)[:, None, None]  # (h, 1, 1, b, b)
    logits = (blocks.k.permute(0, 2, 3, 1).unsqueeze(-2) + bias).masked_fill(later, -torch.inf)  # (h, B, G, b, b)
    mean = logits.softmax(-1) @ blocks.v.permute(0, 2, 3, 1, 4)  # (h, B, G, b, c)
    log_weight = logits.logsumexp(-1).unsqueeze(-1)  # (h, B, G, b, 1)
    return WeightedMean(mean.permute(0, 3, 1, 2, 4), log_weight.permute(0, 3, 1, 2, 4))


def _window(terms: Tensor, largest: Tensor, r: Tensor, reach: int) -> WeightedMean:
    """The ``reach`` blocks before each block, with exp(r) inside of the window and 1 outside."""
    heads, size, batch, groups, _ = terms.shape
    over = r.detach().amax(1).clamp(min=0.0)[:, None, None]  # (h, 1, 1)
    empty = empty_log_weight(largest.dtype)
    shifted = [F.pad(largest[..., :-lag], (lag, 0), value=empty) for lag in range(1, reach + 1)]
    largest_seen = torch.stack(shifted).amax(0)  # (h, B, G)
    sums = torch.zeros_like(terms)
    for lag in range(1, reach + 1):
        weights = torch.exp(_distance_weights(r, size, lag) - over)  # (h, b, b)
        part = (weights @ terms[:, :, :, :-lag].flatten(2)).unflatten(2, (batch, groups - lag, -1))
        scale = torch.exp(largest[..., :-lag] - largest_seen[..., lag:])[:, None, :, :, None]
        sums = sums + F.pad(part * scale, (0, 0, lag, 0))
    weight = sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    log_weight = weight.log() + (largest_seen + over)[:, None, :, :, None]
    nothing = (torch.arange(groups, device=r.device) == 0)[:, None]  # the first block has none before it
    return WeightedMean(sums[..., :-1] / weight, log_weight.masked_fill(nothing, empty))


def _before(terms: Tensor, largest: Tensor, reach: int, initial: Optional[WeightedMean]) -> WeightedMean:
    """What lies before the window's blocks of each block: (h, 1, B, G, c) and (h, 1, B, G, 1)."""
    sums = terms.sum(1)  # (h, B, G, c + 1)
    blocks = WeightedMean(sums[..., :-1] / sums[..., -1:], sums[..., -1:].log() + largest[..., None])
    groups, behind = sums.shape[2], reach + 1
    first = _nothing(sums) if initial is None else WeightedMean(*(x.transpose(0, 1).unsqueeze(2) for x in initial))
    seen = WeightedMean(*(torch.cat([x, y[:, :, : max(groups - behind, 0)]], dim=2) for x, y in zip(first, blocks)))
    running = running_merge(seen, dim=2)
    # The first ``behind`` blocks see what was there at first.
    at = (torch.arange(groups, device=sums.device) - reach).clamp(min=0)
    return WeightedMean(*(x.index_select(2, at).unsqueeze(1) for x in running))


def _nothing(sums: Tensor) -> WeightedMean:
    """No token at all, beside ``sums`` (h, B, G, c + 1)."""
    mean = torch.zeros_like(sums[:, :, :1, :-1])
    return WeightedMean(mean, torch.full_like(mean[..., :1], empty_log_weight(sums.dtype)))


def _empty_state(k: Tensor, v: Tensor, r: Tensor) -> State:
    """The state before the first token."""
    batch, heads, _, channels = v.shape
    like = {"dtype": v.dtype, "device": v.device}
    return {
        "count": torch.zeros(batch, dtype=torch.long, device=v.device),
        "k": torch.zeros(batch, heads, r.shape[1], **like),
        "v": torch.zeros(batch, heads, r.shape[1], channels, **like),
        "mean": torch.zeros(batch, heads, channels, **like),
        "log_weight": torch.full((batch, heads), empty_log_weight(v.dtype), **like),
    }


def _step(
    k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], state: State, local_only: bool
) -> Tuple[Tensor, State]:
    """One token after ``state``; O(window d)."""
    window = r.shape[1]
    before = WeightedMean(state["mean"], state["log_weight"].unsqueeze(-1))
    if not local_only:
        leaving = (state["count"] >= window)[:, None, None]  # (B, 1, 1): the oldest is a token
        oldest = state["k"][:, :, :1].masked_fill(~leaving, empty_log_weight(v.dtype))
        before = merge(WeightedMean(state["v"][:, :, 0], oldest), before)
    keys, values = torch.cat([state["k"][:, :, 1:], k], dim=2), torch.cat([state["v"][:, :, 1:], v], dim=2)
    missing = torch.arange(window, device=k.device) < window - 1 - state["count"][:, None]  # (B, window)
    logits = (keys + r).masked_fill(missing[:, None], -torch.inf)  # (B, h, window)
    out = (logits.softmax(-1).unsqueeze(2) @ values).squeeze(2)  # (B, h, c)
    if not local_only:
        out = merge(before, WeightedMean(out, logits.logsumexp(-1, keepdim=True))).mean
    new = {"count": state["count"] + 1, "k": keys, "v": values, "mean": before.mean}
    new["log_weight"] = before.log_weight.squeeze(-1)
    if padding_mask is not None:  # a padded token leaves its row's state as it was
        keep = padding_mask[:, 0]
        new = {name: torch.where(keep.view(-1, *[1] * (x.dim() - 1)), state[name], x) for name, x in new.items()}
    return out.unsqueeze(2), new


def _continued(
    k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], state: State, local_only: bool
) -> Tuple[Tensor, State]:
    """T tokens after ``state``: the form of a whole sequence over its window and them."""
    batch, window, tokens = k.shape[0], r.shape[1], k.shape[2]
    if padding_mask is None:
        padding_mask = torch.zeros(batch, tokens, dtype=torch.bool, device=k.device)
    unused = torch.arange(window, device=k.device) < window - state["count"][:, None]  # (B, window): slots of no token
    padding = torch.cat([unused, padding_mask], dim=1)
    order = real_first(padding)
    k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
    k, v = take(k.unsqueeze(-1), order).squeeze(-1), take(v, order)
    initial = WeightedMean(state["mean"], state["log_weight"].unsqueeze(-1))
    out = _direct(k, v, r, True) if local_only else _blocked(k, v, r, initial)
    out = take(out, invert(order))[:, :, window:]
    real = (~padding).sum(1)  # (B,)
    # The last ``window`` real tokens, and before them slots without a token while there are fewer.
    slots = real[:, None] - window + torch.arange(window, device=k.device)  # (B, window)
    last = take(torch.cat([k.unsqueeze(-1), v], dim=-1), slots.clamp(min=0))
    before = initial
    if not local_only:
        leaving = torch.arange(k.shape[2], device=k.device) < (real - window)[:, None]  # (B, window + T)
        logits = k.masked_fill(~leaving[:, None], empty_log_weight(k.dtype))
        mean = (logits.softmax(-1).unsqueeze(2) @ v).squeeze(2)  # (B, h, c)
        before = merge(WeightedMean(mean, logits.logsumexp(-1, keepdim=True)), initial)
    empty = (slots < 0)[:, None, :, None]
    last = last.masked_fill(empty, 0.0)
    new = {"count": state["count"] + (~padding_mask).sum(1), "k": last[..., 0], "v": last[..., 1:]}
    return out, {**new, "mean": before.mean, "log_weight": before.log_weight.squeeze(-1)}
