"""Means under exponential weights, each with the logarithm of its weight, so that merging them cannot overflow."""

from typing import NamedTuple

import torch
from torch import Tensor


class WeightedMean(NamedTuple):
    """Σ exp(a_i) x_i / Σ exp(a_i) and log Σ exp(a_i), over some set of i."""

    mean: Tensor  # (..., c)
    log_weight: Tensor  # (..., c), or (..., 1) where channels share their weights


def empty_log_weight(dtype: torch.dtype) -> float:
    """The logarithm of the weight of no i at all: finite, as differences of infinities are not numbers."""
    return torch.finfo(dtype).min / 4


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
