"""Nearest neighbours by dynamic time warping, for series of several channels and of any lengths.

Berndt and Clifford, *Using Dynamic Time Warping to Find Patterns in Time Series* (1994). sktime's own needs numba.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: Numbers of a table of distances between steps that are held at once.
AT_ONCE = 2**25


def warped_distances(series: Tensor, others: Tensor, lengths: Tensor) -> Tensor:
    """The least sum of squared distances along a path of steps, from ``series`` (T, C) to each of ``others``: (N,).

    All channels are warped together, without a window. ``others`` (N, L, C) are padded at the end, and ``lengths``
    (N,) says from where on. A path goes by one step in one of both or in both. O(N T L C).
    """
    steps, longest = len(series), others.shape[1]
    costs = torch.cdist(series[None], others, compute_mode="donot_use_mm_for_euclid_dist").square()  # (N, T, L)
    found = costs.new_empty(len(others))
    # A diagonal has the cells (i, diagonal - i); the least sum to cell i is at i + 1, and at 0 is none.
    last = before = torch.full((len(others), steps + 1), torch.inf, dtype=costs.dtype)
    for diagonal in range(steps + longest - 1):
        low, high = max(0, diagonal - longest + 1), min(steps - 1, diagonal) + 1
        i = torch.arange(low, high)
        best = torch.minimum(torch.minimum(last[:, low:high], last[:, low + 1 : high + 1]), before[:, low:high])
        now = torch.full_like(last, torch.inf)
        now[:, low + 1 : high + 1] = costs[:, i, diagonal - i] + (best if diagonal else 0.0)
        ends = lengths - 1 + steps - 1 == diagonal
        found[ends] = now[ends, steps]
        before, last = last, now
    return found


def nearest(
    train: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    progress: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] = lambda series: series,
) -> list[int]:
    """The number of the nearest series of ``train`` (T, C) for each of ``test``; the first of several."""
    others = pad_sequence([torch.from_numpy(one) for one in train], batch_first=True)
    lengths = torch.tensor([len(one) for one in train])
    found = []
    for one in progress(test):
        rows = max(1, AT_ONCE // (len(one) * others.shape[1]))
        parts = zip(others.split(rows), lengths.split(rows))
        found.append(int(torch.cat([warped_distances(torch.from_numpy(one), *part) for part in parts]).argmin()))
    return found
