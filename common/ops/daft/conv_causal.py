"""Causal DAFT-conv of a whole sequence in plain PyTorch: as a convolution, or in chunks."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import chunk_length, split_chunks
from ..shared.padding import put_back
from .heads import align_heads
from .weighted_means import (
    WeightedMean,
    empty_log_weight,
    exponentials,
    headroom,
    mean_of_sums,
    merge,
    running_merge,
    sums_before,
)

#: Up to this product of window and channels per head, a causal sequence is convolved. Measured on one CPU core
#: on 2026-11-20, forward and backward in seconds, d = 512, convolved against chunks of 16: window 64 at T = 4096 with
#: 1, 2, 4, 8 channels 0.38/1.23, 0.24/0.59, 0.19/0.27, 0.86/0.13; window 256 at T = 3072 with 1, 2, 4 channels
#: 0.69/0.89, 0.91/0.41, 1.06/0.28. By FFT it is as fast, but then its error is relative to the largest key of all.
CONVOLVED_SIZE = 256
#: Tokens of a chunk; weights inside a chunk are computed pair by pair.
CHUNK_SIZE = 16


def attend_causal(k: Tensor, v: Tensor, r: Tensor, padding_mask: Tensor | None, local_only: bool) -> Tensor:
    """A causal sequence as a whole: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    # Real tokens come first afterwards, so no real token sees padding.
    k, v, padding, order = align_heads(k, v, padding_mask)
    if local_only or v.shape[3] * r.shape[1] <= CONVOLVED_SIZE:
        return put_back(convolve(k, v, r, padding, local_only), order)
    return put_back(attend_in_chunks(k, v, r, None), order)


def convolve(k: Tensor, v: Tensor, r: Tensor, padding_mask: Tensor | None, local_only: bool) -> Tensor:
    """A depthwise convolution with exp(r) and, unless ``local_only``, a running sum over all earlier tokens, in
    float64.

    Exponentials are relative to the largest key of all, which may come later: float64 holds keys 600 below it.
    """
    channels, window = v.shape[3], r.shape[1]
    terms, _ = exponentials(k.double(), v.double(), padding_mask)  # (B, h, T, c + 1)
    terms = terms.permute(0, 3, 1, 2).flatten(0, 1)  # (B (c + 1), h, T)
    over = r.detach().amax(1, keepdim=True).double()  # (h, 1): exp(r) may overflow
    over = over if local_only else over.clamp(min=0.0)
    filters = torch.exp(r.double() - over).unsqueeze(1)  # (h, 1, window)
    sums = F.conv1d(F.pad(terms, (window - 1, 0)), filters, groups=r.shape[0])
    if not local_only:
        sums = sums + sums_before(terms, window) * torch.exp(-over)
    sums = sums.unflatten(0, (-1, channels + 1))  # (B, c + 1, h, T)
    mean, _ = mean_of_sums(sums[:, :-1], sums[:, -1:], sums.new_zeros(()))
    return mean.permute(0, 2, 3, 1).to(v.dtype)


class _Chunks(NamedTuple):
    """Keys and values in chunks of C tokens, with all chunks of the batch together for products with (h, C, C)."""

    k: Tensor  # (h, C, B, G)
    v: Tensor  # (h, C, B, G, c)


def attend_in_chunks(k: Tensor, v: Tensor, r: Tensor, initial: WeightedMean | None) -> Tensor:
    """Chunks of C tokens: pairs inside a chunk, Toeplitz products with chunks in the window's reach, sums before these.

    k (B, h, T), v (B, h, T, c), r (h, window) -> (B, h, T, c); ``initial`` (B, h, c), (B, h, 1) is the mean over all
    tokens before the first one, which are outside of every window. O(T (window + C) c) time, O(T (C + c)) memory.
    """
    tokens, window = k.shape[2], r.shape[1]
    size = chunk_length(CHUNK_SIZE, tokens)
    k_chunks, v_chunks = split_chunks(k.unsqueeze(-1), size).squeeze(-1), split_chunks(v, size)  # (B, h, G, C, ...)
    chunks = _Chunks(k_chunks.permute(1, 3, 0, 2), v_chunks.permute(1, 3, 0, 2, 4))
    groups = chunks.k.shape[3]
    reach = -(-(window - 1) // size) if tokens > size else 0  # how many chunks back a window may look
    if not torch.compiler.is_compiling():  # a graph must not depend on the length
        reach = min(reach, groups - 1)
    scale = chunks.k.detach().amax(1) - headroom()  # (h, B, G)
    weight = torch.exp(chunks.k - scale[:, None]).unsqueeze(-1)  # (h, C, B, G, 1)
    terms = torch.cat([weight * chunks.v, weight], dim=-1)  # (h, C, B, G, c + 1)
    parts = [_inside(chunks, r), _before(terms, scale, reach, initial)]
    if reach > 0:
        parts.append(_window(terms, scale, r, reach))
    out = parts[0]
    for part in parts[1:]:
        out = merge(part, out)
    # (h, C, B, G, c) -> (B, h, G C, c)
    return out.mean.permute(2, 0, 3, 1, 4).flatten(2, 3)[:, :, :tokens]


def _distance_weights(r: Tensor, size: int, lags: range) -> Tensor:
    """r between the tokens of a chunk and of the chunks ``lags`` before it, 0 outside of the window: (h, C, lags C)."""
    position = torch.arange(size, device=r.device)
    before = torch.arange(lags.start, lags.stop, device=r.device)[:, None] * size - position  # (lags, C)
    distance = (position[:, None, None] + before).flatten(1)  # (C, lags C)
    index = r.shape[1] - 1 - distance
    inside = (distance >= 0) & (index >= 0)
    return r[:, index.clamp(0, r.shape[1] - 1)].masked_fill(~inside, 0.0)


def _inside(chunks: _Chunks, r: Tensor) -> WeightedMean:
    """Each token over its chunk up to itself, pair by pair, so that no maximum includes a later key."""
    size = chunks.k.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=r.device).triu(1)
    bias = _distance_weights(r, size, range(1))[:, None, None]  # (h, 1, 1, C, C)
    logits = (chunks.k.permute(0, 2, 3, 1).unsqueeze(-2) + bias).masked_fill(later, -torch.inf)  # (h, B, G, C, C)
    mean = logits.softmax(-1) @ chunks.v.permute(0, 2, 3, 1, 4)  # (h, B, G, C, c)
    log_weight = logits.logsumexp(-1).unsqueeze(-1)  # (h, B, G, C, 1)
    return WeightedMean(mean.permute(0, 3, 1, 2, 4), log_weight.permute(0, 3, 1, 2, 4))


def _window(terms: Tensor, scale: Tensor, r: Tensor, reach: int) -> WeightedMean:
    """The ``reach`` chunks before each chunk, with exp(r) inside of the window and 1 outside."""
    size, groups, lags = terms.shape[1], terms.shape[3], range(1, reach + 1)
    over = r.detach().amax(1).clamp(min=0.0)[:, None, None] - headroom()  # (h, 1, 1)
    shifted = F.pad(scale, (reach, 0), value=empty_log_weight())
    shifted = torch.stack([shifted.narrow(2, reach - lag, groups) for lag in lags], dim=1)  # (h, lags, B, G)
    scale_seen = shifted.amax(1) - headroom()  # (h, B, G)
    relative = torch.exp(shifted - scale_seen[:, None])[:, :, None, :, :, None].unbind(1)  # (h, 1, B, G, 1) each
    before = F.pad(terms, (0, 0, reach, 0))
    # One product of all lags: (h, C, lags C) times (h, lags C, B G (c + 1))
    before = torch.cat([before.narrow(3, reach - lag, groups) * x for lag, x in zip(lags, relative)], dim=1)
    sums = torch.exp(_distance_weights(r, size, lags) - over) @ before.flatten(2)
    sums = sums.view_as(terms)
    # The first chunk has no chunk before it: its weight is 0.
    return mean_of_sums(sums[..., :-1], sums[..., -1:], (scale_seen + over)[:, None, :, :, None])


def _before(terms: Tensor, scale: Tensor, reach: int, initial: WeightedMean | None) -> WeightedMean:
    """For each chunk, the mean over tokens before its window's reach: (h, 1, B, G, c) and (h, 1, B, G, 1)."""
    sums = terms.sum(1)  # (h, B, G, c + 1)
    means = mean_of_sums(sums[..., :-1], sums[..., -1:], scale[..., None])
    groups, nothing = sums.shape[2], (0.0, empty_log_weight())
    # The first ``reach`` + 1 chunks see nothing but ``initial``.
    later = [F.pad(x, (0, 0, reach, 0), value=value) for x, value in zip(means, nothing)]
    if initial is None:
        seen = [F.pad(x, (0, 0, 1, 0), value=value) for x, value in zip(later, nothing)]
    else:
        seen = [torch.cat([x.transpose(0, 1).unsqueeze(2), y], dim=2) for x, y in zip(initial, later)]
    running = running_merge(WeightedMean(*(x.narrow(2, 0, groups) for x in seen)))
    return WeightedMean(*(x.unsqueeze(1) for x in running))
