"""Rocket: features of a series by thousands of random convolutions, for a linear classifier.

Dempster, Petitjean, Webb: *ROCKET: Exceptionally fast and accurate time series classification using random
convolutional kernels* (2020), with several channels as in sktime, whose own needs numba. Series are standardised by the
statistics of the data set, as for all models here, and not each by its own, which would hide their levels.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

KERNELS = 10_000
#: Steps that a kernel weighs, one of these by chance.
LENGTHS = (7, 9, 11)
#: Series at once, whose outputs fit a cache.
_AT_ONCE = 512


class Kernel(NamedTuple):
    """One random convolution of some of the channels."""

    channels: Tensor  # (c,), their numbers
    weight: Tensor  # (1, c, length), of mean 0 in each channel
    bias: Tensor  # (1,)
    dilation: int
    padding: int  # zeros on either side


def draw_kernels(channels: int, steps: int, count: int, rng: np.random.Generator) -> list[Kernel]:
    """``count`` kernels for series of ``steps`` steps.

    Raises:
        ValueError: series too short for any kernel.
    """
    lengths = [length for length in LENGTHS if length <= steps]
    if not lengths:
        raise ValueError(f"the longest series has {steps} steps; allowed for rocket: at least {min(LENGTHS)}")
    kernels = []
    for _ in range(count):
        length = int(rng.choice(lengths))
        chosen = int(2 ** rng.uniform(0, np.log2(min(channels, length) + 1)))
        weight = rng.normal(size=(1, chosen, length))
        weight -= weight.mean(-1, keepdims=True)
        dilation = int(2 ** rng.uniform(0, np.log2((steps - 1) / (length - 1))))
        padding = (length - 1) * dilation // 2 if rng.integers(2) else 0
        picked = torch.from_numpy(rng.permutation(channels)[:chosen])
        bias = torch.tensor([rng.uniform(-1, 1)]).float()
        kernels.append(Kernel(picked, torch.from_numpy(weight).float(), bias, dilation, padding))
    return kernels


def together(series: Sequence[np.ndarray], steps: int) -> Tensor:
    """Series (T, C) as (N, C, ``steps``): cut, or filled up with zeros, which is the mean of standardised series."""
    made = torch.zeros(len(series), series[0].shape[1], steps)
    for i, one in enumerate(series):
        cut = one[:steps]
        made[i, :, : len(cut)] = torch.from_numpy(cut).float().T
    return made


@torch.no_grad()
def features(
    series: Tensor,
    kernels: Sequence[Kernel],
    progress: Callable[[Sequence[Kernel]], Iterable[Kernel]] = lambda kernels: kernels,
) -> np.ndarray:
    """Two numbers for each kernel: the share of its outputs above 0, and the largest. (N, C, T) -> (N, 2 kernels)."""
    found = []
    for kernel in progress(kernels):
        parts = []
        for some in series.split(_AT_ONCE):
            given = some[:, kernel.channels]
            out = F.conv1d(given, kernel.weight, kernel.bias, 1, kernel.padding, kernel.dilation)[:, 0]
            parts.append(torch.stack([(out > 0).float().mean(1), out.amax(1)], dim=1))
        found.append(torch.cat(parts))
    return torch.cat(found, dim=1).numpy()
