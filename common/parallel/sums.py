"""Sums over the tokens of all processes before this one, in one gather, so that no process waits for its turn.

Every process computes the sums of its own part, all sums are gathered, and each process adds up those before it. The
gradient of a process's sums is the sum of the gradients from the processes after it (LASP-2: Sun et al., 2025).
"""

from typing import Any

import torch
from torch import Tensor

from .group import ContextGroup, first_order_alone

#: The logarithm of the unit of an empty sum, as in FAVOR+.
_NO_UNIT = -1e30


def sums_before(group: ContextGroup, own: Tensor, log_unit: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Σ of ``own`` (B, H, ...) over the processes before this one, 0 in the first; every process must call this.

    With ``log_unit`` (B, H), which has no gradient, sums are in units of exp(log_unit). The result is then in the
    largest unit of the processes before, whose logarithm is the second result. One message, one back: O(P size of own).
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
    """Σ_(r < rank) exp(units_r - largest_rank) own_r, with ``units`` and ``largest`` (P, B, H) of all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ContextGroup, units: Tensor, largest: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(units, largest)
        gathered, rank = group.gather(own), group.rank
        return _weighted(gathered[:rank], units[:rank] - largest[rank])

    @staticmethod
    @first_order_alone
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        units, largest = ctx.saved_tensors
        gathered, after = ctx.group.gather(grad), ctx.group.rank + 1
        return _weighted(gathered[after:], units[after - 1] - largest[after:]), None, None, None


def _weighted(every: Tensor, log_weights: Tensor) -> Tensor:
    """Σ_r exp(log_weights_r) every_r, for ``every`` (r, B, H, ...) and ``log_weights`` (r, B, H)."""
    return (every * log_weights.exp().view(*log_weights.shape, *[1] * (every.dim() - 3))).sum(0)
