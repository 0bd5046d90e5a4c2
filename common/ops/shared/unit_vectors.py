"""Vectors of length 1."""

import torch
from torch import Tensor
from torch.nn import functional as F

#: Vectors shorter than this are divided by it.
_SHORTEST = 1e-12


def unit_vectors(x: Tensor) -> Tensor:
    """x (..., c) divided by its length, or by 1e-12 if that is larger, with all derivatives; O(size of x).

    ``F.normalize`` is the same function, but its second derivative at 0 is NaN, which products spread to other tokens.
    """
    short = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True) < _SHORTEST
    return torch.where(short, x / _SHORTEST, F.normalize(x.masked_fill(short, 1.0), dim=-1))
