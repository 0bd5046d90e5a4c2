"""Means under exponential weights, each with the logarithm of its weight, so that merging them cannot overflow."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import chunk_length, split_chunks
from ..shared.log_sums import log_add

#: Number of means that are merged by one product with a matrix.
_FEW = 32


class WeightedMean(NamedTuple):
    """Σ exp(a_i) x_i / Σ exp(a_i) and log Σ exp(a_i), over some set of i."""

    mean: Tensor  # (..., c)
    log_weight: Tensor  # (..., c), or (..., 1) where channels share their weights


def empty_log_weight() -> float:
    """The logarithm of the weight of an empty set (a function, because TorchScript cannot read module globals).

    Finite, since the difference of two infinities is NaN.
    """
    return -1e37


def headroom() -> float:
    """The logarithm of the largest of several exponentials that are taken relative to it (a function for TorchScript).

    With exp(20) in place of exp(0), products of three factors summed over thousands of terms are still far inside the
    range of float32, and each factor keeps its precision down to exp(-107) of the largest.
    """
    return 20.0


def exponentials(k: Tensor, v: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(k) v and exp(k), concatenated, relative to the largest key of each head, and the logarithm of that scale.

    k (B, h, T), v (B, h, T, c) -> (B, h, T, c + 1) and (B, h, 1, 1); O(T c). ``padding_mask``: bool (B, T), True =
    padding: its terms are 0 and it is never the largest key, except in a row of only padding.
    """
    keys = k if padding_mask is None else k.masked_fill(padding_mask[:, None], empty_log_weight())
    scale = keys.detach().amax(2, keepdim=True) - headroom()  # (B, h, 1)
    weight = torch.exp(keys - scale).unsqueeze(-1)  # (B, h, T, 1)
    return torch.cat([weight * v, weight], dim=-1), scale.unsqueeze(-1)


def mean_of_sums(weighted: Tensor, weight: Tensor, log_scale: Tensor) -> WeightedMean:
    """The mean from Σ w x and Σ w with w relative to exp(``log_scale``); an empty sum has no weight."""
    # The smallest normal number, written out because TorchScript has no torch.finfo.
    positive = weight.clamp(min=2.2250738585072014e-308 if weight.dtype == torch.float64 else 1.1754943508222875e-38)
    # Divide both by a constant first: the gradient of a single division by a small weight is 0 times infinity, NaN.
    constant = positive.detach()
    relative = positive / constant
    log_weight = relative.log() + constant.log() + log_scale
    return WeightedMean((weighted / constant) / relative, log_weight.masked_fill(weight == 0.0, empty_log_weight()))


def sums_before(x: Tensor, distance: int) -> Tensor:
    """The sum over the places at least ``distance`` before each of x (..., places), of the shape of x; O(size of x)."""
    length = x.shape[-1]
    if length == 1:  # the sum below, over one place, is wrong on a GPU under torch.compile of torch 2.11
        return torch.zeros_like(x)
    return F.pad(x, [distance, 0])[..., :length].cumsum(-1)


def merge(first: WeightedMean, second: WeightedMean) -> WeightedMean:
    """The mean over both sets; elementwise, so that shapes may broadcast."""
    share = torch.sigmoid(first.log_weight - second.log_weight)
    mean = second.mean + share * (first.mean - second.mean)
    return WeightedMean(mean, log_add(first.log_weight, second.log_weight))


def running_merge(means: WeightedMean) -> WeightedMean:
    """The means over all sets up to and including each one: (h, B, n, c) and (h, B, n, 1).

    O(n c + (n / 32)²): 32 at a time, and then all their ends at once, so the number of operations does not depend on n.
    """
    length = means.mean.shape[2]
    size = chunk_length(_FEW, length)
    parts = _running(WeightedMean(*(split_chunks(x, size) for x in means)))  # (h, B, n / 32, 32, ...)
    if length > size:
        ends = (x[:, :, :-1, -1] for x in parts)
        before = zip(ends, (0.0, empty_log_weight()))
        before = _running(WeightedMean(*(F.pad(x, (0, 0, 1, 0), value=value) for x, value in before)))
        parts = merge(WeightedMean(*(x.unsqueeze(3) for x in before)), parts)
    return WeightedMean(*(x.flatten(2, 3).narrow(2, 0, length) for x in parts))


def _running(means: WeightedMean) -> WeightedMean:
    """``running_merge`` of (..., n, c) and (..., n, 1) as a product with (..., n, n); O(n² c)."""
    later = torch.ones(2 * means.mean.shape[-2:-1], dtype=torch.bool, device=means.mean.device).triu(1)
    logits = means.log_weight.transpose(-2, -1).masked_fill(later, -torch.inf)
    return WeightedMean(logits.softmax(-1) @ means.mean, logits.logsumexp(-1, keepdim=True))
