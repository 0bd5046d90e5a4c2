"""Logarithms of sums of exponentials with derivatives of every order.

The second derivatives of ``torch.logcumsumexp`` and ``torch.logaddexp`` are NaN if one term is far below another,
such as an empty sum or padding. Without a graph, torch's functions are used.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .decayed_cumsum import decayed_cumsum


def log_add(first: Tensor, second: Tensor) -> Tensor:
    """log(exp(first) + exp(second)) for finite numbers in shapes that broadcast; O(size of the result)."""
    if not torch.is_grad_enabled():
        return torch.logaddexp(first, second)
    unit = torch.maximum(first, second).detach()
    return unit + ((first - unit).exp() + (second - unit).exp()).log()


def log_cumsum(x: Tensor, before: Tensor) -> Tensor:
    """log(exp(before) + Σ_(j <= i) exp(x_j)) for finite x (B, H, n) and ``before`` (B, H); O(B H n).

    torch.compile, which has no second derivatives, sees one operation for any length.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.cat([before.unsqueeze(-1), x], dim=-1).logcumsumexp(-1)[..., 1:]
    x = x.unsqueeze(-1)
    return decayed_log_cumsum(x, torch.zeros_like(x), before.unsqueeze(-1)).squeeze(-1)


def decayed_log_cumsum(x: Tensor, log_decay: Tensor, before: Tensor) -> Tensor:
    """log Σ_(j <= i) Γ_ij exp(x_j) with Γ_ij = exp(Σ_(j < t <= i) log_decay_t), for x and ``log_decay`` (B, H, n, g).

    ``before`` (B, H, g) is the logarithm of the sum before the first token. O(size of x). Sums are in units of exp(m),
    where m is the largest logit so far, which decays too: so nothing overflows, and forgotten tokens do not hide later
    ones. Rounding of m only changes the unit.
    """
    first = before.unsqueeze(2)
    if x.shape[2] == 1:
        return log_add(first + log_decay, x)
    since_start = F.pad(log_decay, (0, 0, 1, 0)).cumsum(2)
    # Detached and not under no_grad(), which torch's pipelining cannot cut: (B, H, 1 + n, g)
    unit = (torch.cat([first, x], dim=2).detach() - since_start.detach()).cummax(2).values + since_start.detach()
    decay = unit[:, :, :-1] - unit[:, :, 1:]
    start = (before - unit[:, :, 0]).exp()
    total = decayed_cumsum((x - unit[:, :, 1:]).exp(), log_decay + decay, start)
    return unit[:, :, 1:] + total.log()
