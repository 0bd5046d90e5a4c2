"""Sums over the tokens of all processes before this one, gathered at once, so that none of them waits for its turn.

Every process forms the sums of its own part, all of them gather those of all, and each adds up what lies before it. The
gradient of a process's sums is the sum over what the processes after it make of it (LASP-2: Sun et al., 2025).
"""

from typing import Any

import torch
from torch import Tensor

from .group import ContextGroup, first_order_alone

#: The logarithm of the unit of no sum at all, as FAVOR+ has it.
_NO_UNIT = -1e30


def sums_before(group: ContextGroup, own: Tensor, log_unit: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Σ of ``own`` (B, H, ...) of the processes before this one, 0 in the first; every process calls this.

    With ``log_unit`` (B, H), which has no gradient, sums are in units of exp(log_unit), and so is the result, in units
    of the largest before, whose logarithm is the second result. One message, one back: O(P size of own).
    """
    if log_unit is None:
        units = own.new_zeros(group.size, *own.shape[:2])
    else:
        units = group.gather(log_unit.detach())
    largest = torch.cat([torch.full_like(units[:1], _NO_UNIT), units.cummax(0).values[:-1]])  # before each process
    if log_unit is None:
        largest = torch.zeros_like(largest)
    return _SumsBefore.apply(own, group, units, largest), None if log_unit is None else largest[group.rank]


class _SumsBefore(torch.autograd.Function):
    """Σ_(r < rank) exp(units_r - largest_rank) own_r, for ``units`` and ``largest`` (P, B, H) of all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ContextGroup, units: Tensor, largest: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(units, largest)
        every, rank = group.gather(own), group.rank
        return _weighted(every[:rank], units[:rank] - largest[rank])

    @staticmethod
    @first_order_alone
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        units, largest = ctx.saved_tensors
        every, after = ctx.group.gather(grad), ctx.group.rank + 1
        return _weighted(every[after:], units[after - 1] - largest[after:]), None, None, None


def _weighted(every: Tensor, log_weights: Tensor) -> Tensor:
    """Σ_r exp(log_weights_r) every_r, for (r, B, H, ...) and (r, B, H)."""
    return (every * log_weights.exp().view(*log_weights.shape, *[1] * (every.dim() - 3))).sum(0)
