"""Elementwise, positive feature maps phi of the linear mechanisms (Flowformer, Table 10)."""

import torch
from torch import Tensor
from torch.nn import functional as F

FEATURE_MAPS = ("sigmoid", "elu+1", "relu")


def feature_map(x: Tensor, phi: str) -> Tensor:
    """phi(x), positive and of the shape of ``x``; O(size of x).

    ``relu`` adds 1e-6, as the authors' long-range-arena code does: a sink whose features are all zero would divide
    by an incoming flow of zero.
    """
    if phi == "sigmoid":
        return torch.sigmoid(x)
    if phi == "elu+1":
        return F.elu(x) + 1.0
    return F.relu(x) + 1e-6
