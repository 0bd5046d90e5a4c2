"""DAFT-conv that is not causal, of sequences and images, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.depthwise import depthwise_conv2d
from ..shared.padding import put_back
from ..shared.precision import autocast_remains
from .heads import align_heads
from .weighted_means import WeightedMean, exponentials, headroom, mean_of_sums, merge, sums_before


def attend_centred(
    k: Tensor,
    v: Tensor,
    r: Tensor,
    shape: Sequence[int] | None,
    padding_mask: Tensor | None,
    local_only: bool,
) -> Tensor:
    """A sequence or an image as a whole: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    if shape is not None:  # tokens of an image keep their positions, even if others are padding
        return attend_raster(k, v, r, shape[0], shape[1], padding_mask, local_only)
    k, v, padding, order = align_heads(k, v, padding_mask)
    # A sequence is an image of one row.
    return put_back(attend_raster(k, v, r.unsqueeze(1), 1, v.shape[2], padding, local_only), order)


def attend_raster(
    k: Tensor, v: Tensor, r: Tensor, height: int, width: int, padding_mask: Tensor | None, local_only: bool
) -> Tensor:
    """An image as a whole: a depthwise convolution with exp(r) inside each window, and the sums outside of it.

    (B, h, T) and (B, h, T, c) -> (B, h, T, c). Equation 8 adds the sums over all tokens and a convolution with
    exp(r) - 1. This is equal, but the two terms cancel numerically if the window holds the largest key and r is far
    below 0.
    """
    channels, dtype = v.shape[3], v.dtype
    if local_only or autocast_remains(k):
        # The largest key may be outside of the window, which is all a token sees: float64 holds keys 600 below it.
        k, v, r = k.double(), v.double(), r.double()
    terms, scale = exponentials(k, v, padding_mask)  # (B, h, T, c + 1)
    maps = terms.permute(0, 3, 1, 2).flatten(0, 1).unflatten(2, [height, width])  # (B (c + 1), h, H, W)
    over = r.detach().flatten(1).amax(1).view(-1, 1, 1) - headroom()  # (h, 1, 1)
    filters = torch.exp(r - over).unsqueeze(1)  # (h, 1, kh, kw)
    near = depthwise_conv2d(maps, filters)
    out = _mean_of_maps(near, channels, scale + over)
    if not local_only:
        out = merge(_mean_of_maps(_outside(maps, r.shape[1], r.shape[2]), channels, scale), out)
    return out.mean.to(dtype)


def _mean_of_maps(maps: Tensor, channels: int, log_scale: Tensor) -> WeightedMean:
    """(B (c + 1), h, H, W) -> (B, h, T, c), (B, h, T, 1)."""
    sums = maps.flatten(2).unflatten(0, [-1, channels + 1]).permute(0, 2, 3, 1)  # (B, h, T, c + 1)
    return mean_of_sums(sums[..., :-1], sums[..., -1:], log_scale)


def _outside(maps: Tensor, height: int, width: int) -> Tensor:
    """For maps (N, h, H, W), the sum over all places outside of each place's window (height, width); O(T height)."""
    sides = _beyond(maps, width // 2)
    if height > 1:  # the sum over the rows of the window
        ones = torch.ones([maps.shape[1], 1, height, 1], dtype=maps.dtype, device=maps.device)
        sides = F.conv2d(sides, ones, padding=[height // 2, 0], groups=maps.shape[1])
    return sides + _beyond(maps.sum(3), height // 2).unsqueeze(3)


def _beyond(x: Tensor, reach: int) -> Tensor:
    """The sum over the places more than ``reach`` before or after each, along the last dimension; O(size of x)."""
    return sums_before(x, reach + 1) + sums_before(x.flip([-1]), reach + 1).flip([-1])
