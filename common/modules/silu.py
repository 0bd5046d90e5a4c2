"""silu of a projection that is split into several tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.shared.autograd import graph_gradients
from ..ops.shared.tracing import runs_eagerly


def silu_parts(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """silu of x (..., Σ widths), split into contiguous parts (..., width); O(size of x)."""
    return _SiluParts.apply(x, widths) if torch.is_grad_enabled() and runs_eagerly(x) else _parts(x, widths)


def _parts(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(F.silu(part) for part in x.split(widths, dim=-1))


class _SiluParts(torch.autograd.Function):
    """``silu_parts``; autograd alone would first concatenate the gradients of the parts in another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.widths = widths
        return _parts(x, widths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not runs_eagerly(*grads):
            return *graph_gradients(lambda x: _parts(x, ctx.widths), (x,), grads), None
        grad_x = torch.empty_like(x)
        for grad, part, grad_part in zip(grads, x.split(ctx.widths, dim=-1), grad_x.split(ctx.widths, dim=-1)):
            torch.ops.aten.silu_backward.grad_input(grad, part, grad_input=grad_part)
        return grad_x, None
