"""Means under exponential weights, each with the logarithm of its weight, so that merging them cannot overflow."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class WeightedMean(NamedTuple):
    """Σ exp(a_i) x_i / Σ exp(a_i) and log Σ exp(a_i), over some set of i."""

    mean: Tensor  # (..., c)
    log_weight: Tensor  # (..., c), or (..., 1) where channels share their weights


def empty_log_weight() -> float:
    """The logarithm of the weight of no i at all: finite, as differences of infinities are not numbers."""
    return -1e37


def headroom() -> float:
    """How far above 1 the largest of several exponentials is taken, which leaves as much more room below it.

    Three factors of exp(20), summed over thousands of terms, stay far inside the range of float32; a factor then
    keeps its precision down to exp(-107) of the largest, as keys of ±100 beside biases of ±50 need.
    """
    return 20.0


def exponentials(k: Tensor, v: Tensor, padding_mask: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """exp(k) v and exp(k) side by side, relative to the largest key of each head, and the logarithm of that scale.

    k (B, h, T), v (B, h, T, c) -> (B, h, T, c + 1) and (B, h, 1, 1); O(T c). ``padding_mask``: bool (B, T), True =
    padding, whose terms are 0 and which is no largest key, but in a row of padding alone.
    """
    keys = k if padding_mask is None else k.masked_fill(padding_mask[:, None], empty_log_weight())
    scale = keys.detach().amax(2, keepdim=True) - headroom()  # (B, h, 1)
    weight = torch.exp(keys - scale).unsqueeze(-1)  # (B, h, T, 1)
    return torch.cat([weight * v, weight], dim=-1), scale.unsqueeze(-1)


def mean_of_sums(weighted: Tensor, weight: Tensor, log_scale: Tensor) -> WeightedMean:
    """From Σ w x and Σ w, whose w are relative to exp(``log_scale``); sums of nothing weigh nothing. Elementwise."""
    # The smallest normal number, written out as TorchScript has no torch.finfo.
    some = weight.clamp(min=2.2250738585072014e-308 if weight.dtype == torch.float64 else 1.1754943508222875e-38)
    return WeightedMean(weighted / some, (some.log() + log_scale).masked_fill(weight == 0.0, empty_log_weight()))


def merge(first: WeightedMean, second: WeightedMean) -> WeightedMean:
    """The mean over both sets; elementwise, so that shapes may broadcast."""
    share = torch.sigmoid(first.log_weight - second.log_weight)
    mean = second.mean + share * (first.mean - second.mean)
    return WeightedMean(mean, torch.logaddexp(first.log_weight, second.log_weight))


def running_merge(means: WeightedMean, dim: int) -> WeightedMean:
    """Over all sets up to each along ``dim``, itself included; O(n log n), in log n steps."""
    step, length = 1, means.mean.shape[dim]
    while step < length:
        kept = (x.narrow(dim, 0, step) for x in means)
        earlier = WeightedMean(*(x.narrow(dim, 0, length - step) for x in means))
        later = WeightedMean(*(x.narrow(dim, step, length - step) for x in means))
        means = WeightedMean(*(torch.cat(x, dim=dim) for x in zip(kept, merge(earlier, later))))
        step *= 2
    return means
