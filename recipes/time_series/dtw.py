"""Nearest neighbours by dynamic time warping, for series of several channels and of any lengths.

Berndt and Clifford, *Using Dynamic Time Warping to Find Patterns in Time Series* (1994). sktime's version needs numba.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: Maximum size of a tensor of distances between steps.
AT_ONCE = 2**25


def warped_distances(series: Tensor, others: Tensor, lengths: Tensor) -> Tensor:
    """Minimum sum of squared distances along a warping path from ``series`` (T, C) to each of ``others``: (N,).

    All channels are warped together, without a window. ``others`` (N, L, C) are padded at the end; their ``lengths``
    are (N,). A path advances by one step in one of the series or in both. O(N T L C).
    """
    steps, longest = len(series), others.shape[1]
    costs = torch.cdist(series[None], others, compute_mode="donot_use_mm_for_euclid_dist").square()  # (N, T, L)
    distances = costs.new_empty(len(others))
    # A diagonal has the cells (i, diagonal - i); index i + 1 has the minimum sum to cell i, index 0 is infinite.
    last = before = torch.full((len(others), steps + 1), torch.inf, dtype=costs.dtype)
    for diagonal in range(steps + longest - 1):
        low, high = max(0, diagonal - longest + 1), min(steps - 1, diagonal) + 1
        i = torch.arange(low, high)
        best_before = torch.minimum(torch.minimum(last[:, low:high], last[:, low + 1 : high + 1]), before[:, low:high])
        current = torch.full_like(last, torch.inf)
        current[:, low + 1 : high + 1] = costs[:, i, diagonal - i] + (best_before if diagonal else 0.0)
        ends = lengths - 1 + steps - 1 == diagonal
        distances[ends] = current[ends, steps]
        before, last = last, current
    return distances


def nearest(
    train: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    progress: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] = lambda series: series,
) -> list[int]:
    """The index of the nearest series of ``train`` (T, C) for each of ``test``; the first one if several are equal."""
    others = pad_sequence([torch.from_numpy(values) for values in train], batch_first=True)
    lengths = torch.tensor([len(values) for values in train])
    indices = []
    for values in progress(test):
        rows = max(1, AT_ONCE // (len(values) * others.shape[1]))
        chunks = zip(others.split(rows), lengths.split(rows))
        indices.append(
            int(torch.cat([warped_distances(torch.from_numpy(values), *chunk) for chunk in chunks]).argmin())
        )
    return indices
