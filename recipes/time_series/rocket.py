"""Rocket: features of a series by thousands of random convolutions, for a linear classifier.

Dempster, Petitjean, Webb: *ROCKET: Exceptionally fast and accurate time series classification using random
convolutional kernels* (2020), with several channels as in sktime, whose version needs numba. Series are standardised by
the statistics of the data set, as for all models here. Standardising each series alone would hide its level.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

KERNELS = 10_000
#: Kernel lengths, from which one is drawn.
LENGTHS = (7, 9, 11)
#: Series per batch, so that outputs fit into a CPU cache.
_AT_ONCE = 512


class Kernel(NamedTuple):
    """One random convolution over some of the channels."""

    channels: Tensor  # (c,), channel indices
    weight: Tensor  # (1, c, length), with mean 0 per channel
    bias: Tensor  # (1,)
    dilation: int
    padding: int  # zeros on each side


def draw_kernels(channels: int, steps: int, count: int, rng: np.random.Generator) -> list[Kernel]:
    """Draw ``count`` kernels for series of ``steps`` steps.

    Raises:
        ValueError: the series are too short for any kernel.
    """
    lengths = [length for length in LENGTHS if length <= steps]
    if not lengths:
        raise ValueError(f"the longest series has {steps} steps; allowed for rocket: at least {min(LENGTHS)}")
    kernels = []
    for _ in range(count):
        length = int(rng.choice(lengths))
        channel_count = int(2 ** rng.uniform(0, np.log2(min(channels, length) + 1)))
        weight = rng.normal(size=(1, channel_count, length))
        weight -= weight.mean(-1, keepdims=True)
        dilation = int(2 ** rng.uniform(0, np.log2((steps - 1) / (length - 1))))
        padding = (length - 1) * dilation // 2 if rng.integers(2) else 0
        channel_indices = torch.from_numpy(rng.permutation(channels)[:channel_count])
        bias = torch.tensor([rng.uniform(-1, 1)]).float()
        kernels.append(Kernel(channel_indices, torch.from_numpy(weight).float(), bias, dilation, padding))
    return kernels


def together(series: Sequence[np.ndarray], steps: int) -> Tensor:
    """Stack series (T, C) to (N, C, ``steps``): cut, or padded with zeros, the mean of standardised series."""
    stacked = torch.zeros(len(series), series[0].shape[1], steps)
    for i, values in enumerate(series):
        kept_values = values[:steps]
        stacked[i, :, : len(kept_values)] = torch.from_numpy(kept_values).float().T
    return stacked


@torch.no_grad()
def features(
    series: Tensor,
    kernels: Sequence[Kernel],
    progress: Callable[[Sequence[Kernel]], Iterable[Kernel]] = lambda kernels: kernels,
) -> np.ndarray:
    """Two features per kernel: the fraction of outputs above 0, and the maximum. (N, C, T) -> (N, 2 kernels)."""
    kernel_features = []
    for kernel in progress(kernels):
        batch_features = []
        for batch in series.split(_AT_ONCE):
            inputs = batch[:, kernel.channels]
            outputs = F.conv1d(inputs, kernel.weight, kernel.bias, 1, kernel.padding, kernel.dilation)[:, 0]
            batch_features.append(torch.stack([(outputs > 0).float().mean(1), outputs.amax(1)], dim=1))
        kernel_features.append(torch.cat(batch_features))
    return torch.cat(kernel_features, dim=1).numpy()
