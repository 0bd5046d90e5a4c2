"""The logarithm of a sigmoid, of which gates by channel have as many as a sequence has numbers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import runs_eagerly

#: For fewer numbers, the calls take most of the time.
_MANY = 2048


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + e^-x)), in the shape of x; O(size of x)."""
    # The number comes last, since a graph for any length must not ask for it.
    return _LogSigmoid.apply(x) if x.is_cpu and runs_eagerly(x) and x.numel() >= _MANY else F.logsigmoid(x)


class _LogSigmoid(torch.autograd.Function):
    """``log_sigmoid`` by a plain logarithm: on a CPU torch's, of one plus a number, takes five times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        small = x.abs().neg_().exp_()
        total = small + 1.0
        lost = small.sub_(total - 1.0).div_(total)  # by rounding the total: all of it for a large x
        return x.clamp(max=0.0).sub_(total.log_()).sub_(lost)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(-x)
