"""DAFT-conv: attention without dot products, by key and by distance inside a window, global outside of it.

*A Dot Product Attention Free Transformer*, equations 7-9.
"""

from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from .alignment import invert, put_back, real_first, take
from .checks import State, check_state
from .chunks import autocast_off, autocast_remains
from .daft_conv_blocks import blocked
from .daft_heads import align_heads, check_windowed, gate_heads, split_heads
from .weighted_means import WeightedMean, empty_log_weight, exponentials, headroom, mean_of_sums, merge

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
    keys, values = split_heads(k, v, key_padding_mask)  # (B, h, T), (B, h, T, c)
    state = None
    with autocast_off(v):
        filters = r.to(values.dtype)
        if initial_state is not None:
            shapes = {name: x.shape for name, x in _empty_state(keys, values, filters).items()}
            check_state(initial_state, shapes, values.dtype, v)
        if not causal:
            out = _centred(keys, values, filters, spatial_shape, key_padding_mask, local_only)
        elif initial_state is None and not return_state:
            out = _causal(keys, values, filters, key_padding_mask, local_only)
        else:
            state = _empty_state(keys, values, filters) if initial_state is None else initial_state
            continued = _step if v.shape[1] == 1 else _continued
            out, state = continued(keys, values, filters, key_padding_mask, state, local_only)
        out = gate_heads(q, out, v.dtype, key_padding_mask)
    return (out, state) if return_state else out


def daft_conv_scriptable(
    q: Optional[Tensor], k: Tensor, v: Tensor, r: Tensor, height: int, width: int, local_only: bool
) -> Tensor:
    """``daft_conv`` of whole images, ``causal=False`` and no mask, for callers inside TorchScript.

    Arguments are not checked; shapes and cost as in ``daft_conv``.
    """
    keys, values = split_heads(k, v, None)
    out = _raster(keys, values, r.to(values.dtype), height, width, None, local_only)
    return gate_heads(q, out, v.dtype, None)


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
    check_windowed(q, k, v, r.shape[0], tuple(r.shape[1:]), ("r", "r"), causal, shape, padding_mask)
    if r.device != v.device:
        raise ValueError(f"r is on {r.device}; allowed: the device of the input, {v.device}")


def _centred(
    k: Tensor,
    v: Tensor,
    r: Tensor,
    shape: Optional[Sequence[int]],
    padding_mask: Optional[Tensor],
    local_only: bool,
) -> Tensor:
    """A sequence or an image as a whole: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    if shape is not None:  # places in an image stand, padded or not
        return _raster(k, v, r, shape[0], shape[1], padding_mask, local_only)
    k, v, padding, order = align_heads(k, v, padding_mask)
    # A sequence is an image of one row.
    return put_back(_raster(k, v, r.unsqueeze(1), 1, v.shape[2], padding, local_only), order)


def _raster(
    k: Tensor, v: Tensor, r: Tensor, height: int, width: int, padding_mask: Optional[Tensor], local_only: bool
) -> Tensor:
    """Inside each window a depthwise convolution with exp(r), and the sums over what is outside of it.

    The sums over everything and a convolution with exp(r) - 1, as in equation 9, are the same, but cancel to nothing
    where the window holds the largest key and r is far below 0.
    """
    batch, channels, dtype = v.shape[0], v.shape[3], v.dtype
    if local_only or autocast_remains(k):
        # The largest key of all may be outside of a window that is all that is seen: float64 holds keys 600 below it.
        k, v, r = k.double(), v.double(), r.double()
    terms, scale = exponentials(k, v, padding_mask)  # (B, h, T, c + 1)
    maps = terms.permute(0, 3, 1, 2).flatten(0, 1).unflatten(2, [height, width])  # (B (c + 1), h, H, W)
    over = r.detach().flatten(1).amax(1).view(-1, 1, 1) - headroom()  # (h, 1, 1)
    filters = torch.exp(r - over).unsqueeze(1)  # (h, 1, kh, kw)
    near = F.conv2d(maps, filters, padding=[r.shape[1] // 2, r.shape[2] // 2], groups=r.shape[0])
    out = _mean_of_maps(near, batch, channels, scale + over)
    if not local_only:
        out = merge(_mean_of_maps(_outside(maps, r.shape[1], r.shape[2]), batch, channels, scale), out)
    return out.mean.to(dtype)


def _mean_of_maps(maps: Tensor, batch: int, channels: int, log_scale: Tensor) -> WeightedMean:
    """(B (c + 1), h, H, W) -> (B, h, T, c), (B, h, T, 1)."""
    sums = maps.flatten(2).unflatten(0, [batch, channels + 1]).permute(0, 2, 3, 1)  # (B, h, T, c + 1)
    return mean_of_sums(sums[..., :-1], sums[..., -1:], log_scale)


def _outside(maps: Tensor, height: int, width: int) -> Tensor:
    """The sum of all outside of the window (height, width) around each place of maps (N, h, H, W); O(T height)."""
    sides = _beyond(maps, width // 2)
    if height > 1:  # the sum over the rows of the window
        ones = torch.ones([maps.shape[1], 1, height, 1], dtype=maps.dtype, device=maps.device)
        sides = F.conv2d(sides, ones, padding=[height // 2, 0], groups=maps.shape[1])
    return sides + _beyond(maps.sum(3), height // 2).unsqueeze(3)


def _beyond(x: Tensor, reach: int) -> Tensor:
    """The sum of what is more than ``reach`` places before or behind each along the last dimension; O(size of x)."""
    length = x.shape[-1]
    before = F.pad(x, [reach + 1, 0])[..., :length].cumsum(-1)
    behind = F.pad(x.flip([-1]), [reach + 1, 0])[..., :length].cumsum(-1)
    return before + behind.flip([-1])


def _causal(k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], local_only: bool) -> Tensor:
    """A causal sequence as a whole: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    # The padding stands behind the real tokens then: none that matters sees it.
    k, v, padding, order = align_heads(k, v, padding_mask)
    direct = local_only or v.shape[3] * r.shape[1] <= _DIRECT
    return put_back(_direct(k, v, r, padding, local_only) if direct else blocked(k, v, r, None), order)


def _direct(k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], local_only: bool) -> Tensor:
    """A depthwise convolution with exp(r) and, unless ``local_only``, a running sum of what is behind, in float64.

    Everything is relative to the largest key of all, which may come later: float64 holds keys 600 below it.
    """
    channels, window = v.shape[3], r.shape[1]
    terms, _ = exponentials(k.double(), v.double(), padding_mask)  # (B, h, T, c + 1)
    terms = terms.permute(0, 3, 1, 2).flatten(0, 1)  # (B (c + 1), h, T)
    over = r.detach().amax(1, keepdim=True).double()  # (h, 1): exp(r) may overflow
    over = over if local_only else over.clamp(min=0.0)
    filters = torch.exp(r.double() - over).unsqueeze(1)  # (h, 1, window)
    sums = F.conv1d(F.pad(terms, (window - 1, 0)), filters, groups=r.shape[0])
    if not local_only:
        sums = sums + F.pad(terms, (window, 0))[:, :, : terms.shape[2]].cumsum(2) * torch.exp(-over)
    sums = sums.unflatten(0, (-1, channels + 1))  # (B, c + 1, h, T)
    mean = sums[:, :-1] / sums[:, -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    return mean.permute(0, 2, 3, 1).to(v.dtype)


def _empty_state(k: Tensor, v: Tensor, r: Tensor) -> State:
    """The state before the first token."""
    batch, heads, _, channels = v.shape
    like = {"dtype": v.dtype, "device": v.device}
    return {
        "count": torch.zeros(batch, dtype=torch.long, device=v.device),
        "k": torch.zeros(batch, heads, r.shape[1], **like),
        "v": torch.zeros(batch, heads, r.shape[1], channels, **like),
        "mean": torch.zeros(batch, heads, channels, **like),
        "log_weight": torch.full((batch, heads), empty_log_weight(), **like),
    }


def _step(
    k: Tensor, v: Tensor, r: Tensor, padding_mask: Optional[Tensor], state: State, local_only: bool
) -> Tuple[Tensor, State]:
    """One token after ``state``; O(window d)."""
    window = r.shape[1]
    before = WeightedMean(state["mean"], state["log_weight"].unsqueeze(-1))
    if not local_only:
        leaving = (state["count"] >= window)[:, None, None]  # (B, 1, 1): the oldest is a token
        oldest = state["k"][:, :, :1].masked_fill(~leaving, empty_log_weight())
        before = merge(WeightedMean(state["v"][:, :, 0], oldest), before)
    keys, values = torch.cat([state["k"][:, :, 1:], k], dim=2), torch.cat([state["v"][:, :, 1:], v], dim=2)
    missing = torch.arange(window, device=k.device) < window - 1 - state["count"][:, None]  # (B, window)
    logits = (keys + r).masked_fill(missing[:, None], -torch.inf)  # (B, h, window)
    mean = (logits.softmax(-1).unsqueeze(2) @ values).squeeze(2)  # (B, h, c)
    out = merge(before, WeightedMean(mean, logits.logsumexp(-1, keepdim=True))).mean
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
    out = _direct(k, v, r, padding.gather(1, order), True) if local_only else blocked(k, v, r, initial)
    out = take(out, invert(order))[:, :, window:]
    real = (~padding).sum(1)  # (B,)
    # The last ``window`` real tokens, and before them slots without a token while there are fewer.
    slots = real[:, None] - window + torch.arange(window, device=k.device)  # (B, window)
    last = take(torch.cat([k.unsqueeze(-1), v], dim=-1), slots.clamp(min=0))
    before = initial
    if not local_only:
        leaving = torch.arange(k.shape[2], device=k.device) < (real - window)[:, None]  # (B, window + T)
        logits = k.masked_fill(~leaving[:, None], empty_log_weight())
        mean = (logits.softmax(-1).unsqueeze(2) @ v).squeeze(2)  # (B, h, c)
        before = merge(WeightedMean(mean, logits.logsumexp(-1, keepdim=True)), initial)
    empty = (slots < 0)[:, None, :, None]
    last = last.masked_fill(empty, 0.0)
    new = {"count": state["count"] + (~padding_mask).sum(1), "k": last[..., 0], "v": last[..., 1:]}
    return out, {**new, "mean": before.mean, "log_weight": before.log_weight.squeeze(-1)}
