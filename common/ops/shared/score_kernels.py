"""Score kernels, which turn scores into attention weights: relu², softmax or Mega's Laplace function."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

SCORE_KERNELS = ("relu2", "softmax", "laplace")


def score_kernel(scores: Tensor, kernel: str, hidden: Tensor | None) -> Tensor:
    """Weights in the shape of ``scores`` (..., n, m), zero where ``hidden`` is True.

    ``relu2``: max(x, 0)² (FLASH, ICML 2022). ``softmax``: over the visible entries of a row, all zero in a row without
    any. ``laplace``: (1 + erf((x - μ) / (σ √2))) / 2 with μ = √(1/2), σ = √(1/(4π)), the smooth, bounded neighbour of
    relu² (Mega, ICLR 2023). O(size of scores).
    """
    if kernel == "softmax":
        return masked_softmax(scores, hidden)
    if kernel == "laplace":
        weights = 0.5 * (1.0 + torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2.0 * math.pi)))
    else:
        weights = F.relu(scores).square()
    return weights if hidden is None else weights.masked_fill(hidden, 0.0)


def masked_softmax(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """``score_kernel`` for softmax, of scores in float32 or float64."""
    if hidden is None:
        return scores.softmax(-1)
    # About the smallest number of float32: with -inf, a row without visible entries would be NaN, also in the backward
    # pass.
    return scores.masked_fill(hidden, -3.4e38).softmax(-1).masked_fill(hidden, 0.0)
