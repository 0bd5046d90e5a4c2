"""The weights of causal Flow-Attention, softmaxes over the tokens so far, and their gradients.

Legend: ``flow_attention``.
"""

import math
from typing import NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import from_here
from .flow_options import FlowOptions, bounded, positive

# A logit no softmax over real tokens ever sees; finite, because -inf makes a row of nothing but padding NaN.
_EXCLUDED = -1e30
# Clamps up to here keep exp and its sum over any sequence inside float32; beyond, sums are kept as logarithms.
_EXP_BOUND = 30.0


class Positions(NamedTuple):
    """Where the tokens of some chunks stand in their sequence."""

    count: Tensor  # c, the real tokens up to each one (B or 1, 1, G, C)
    excluded: Optional[Tensor]  # which to leave out, bool (B or 1, 1, G, C)
    total: Tensor  # real tokens up to the last one (B,)


def flow_weights(
    conserved_incoming: Tensor,
    conserved_outgoing: Tensor,
    positions: Positions,
    options: FlowOptions,
    initial: Optional[State],
) -> Tuple[Tensor, Tensor, State]:
    """Competition and allocation (B, H, G, C) from Î and Ô, and the sums of their softmax up to the last token."""
    start: State = {} if initial is None else initial
    logits = bounded(conserved_outgoing / positions.count, options.clamp)
    competition, log_competition = _weight_so_far(
        logits, options.competition, positions, start.get("log_competition"), options.clamp
    )
    allocation, log_allocation = _weight_so_far(
        conserved_incoming / positions.count, options.allocation, positions, start.get("log_allocation"), math.inf
    )
    return competition, allocation, {"log_competition": log_competition, "log_allocation": log_allocation}


def flow_weights_backward(
    conserved: Tensor,
    positions: Positions,
    options: FlowOptions,
    initial: Optional[State],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    grad_logs: State,
) -> Tuple[Tensor, State]:
    """Gradients of Î and Ô, ``conserved`` (2, B, H, G, C), and of the sums of the softmaxes before the first token.

    ``weights`` and ``grads``: competition and allocation, and their gradients; ``grad_logs``: of the sums behind.
    """
    start: State = {} if initial is None else initial
    incoming, outgoing = (conserved / positions.count).unbind()
    grad_outgoing, log_competition = _weight_backward(
        bounded(outgoing, options.clamp), options.competition, positions, start.get("log_competition"), options.clamp,
        weights[0], grads[0], grad_logs["log_competition"],
    )  # fmt: skip
    grad_incoming, log_allocation = _weight_backward(
        incoming, options.allocation, positions, start.get("log_allocation"), math.inf,
        weights[1], grads[1], grad_logs["log_allocation"],
    )  # fmt: skip
    grad_outgoing = grad_outgoing.masked_fill(outgoing > options.clamp, 0.0)  # no flow is negative
    grad_conserved = torch.stack([grad_incoming, grad_outgoing]) / positions.count
    return grad_conserved, {"log_competition": log_competition, "log_allocation": log_allocation}


def flow_scale(allocation: Tensor, incoming: Tensor) -> Tensor:
    """What the sum of each sink in the last line of Algorithm 2 is multiplied by, from and to (B, H, G, C)."""
    return allocation / positive(incoming)


def _weight_so_far(
    flow: Tensor, kind: str, positions: Positions, earlier: Optional[Tensor], bound: float
) -> Tuple[Tensor, Tensor]:
    """Weights (B, H, G, C) among the tokens so far, and log Σ exp(flow) over all (B, H), -1e30 where unused.

    The softmax is exp(flow_i) / Σ_{j<=i} exp(flow_j) · c_i, by logarithms where flow has no bound
    (torch's logcumsumexp has no second derivative, so neither has that).
    """
    before = flow.new_full(flow.shape[:2], _EXCLUDED) if earlier is None else earlier
    if kind == "none":
        return torch.ones_like(flow), before
    if kind == "sigmoid":
        return torch.sigmoid(flow), before
    if bound <= _EXP_BOUND:
        exponentials, so_far = _exponentials(flow, positions, before)
        total = so_far[..., -1]
        # Padding alone has summed nothing yet. Not log().clamp(): the gradient of log at 0 is NaN, clamped or not.
        log_so_far = positive(total).log().masked_fill(total == 0.0, _EXCLUDED)
        weights = exponentials / positive(so_far)
    else:
        logits = torch.cat([before.unsqueeze(-1), _real_logits(flow, positions)], dim=-1)  # (B, H, 1 + G C)
        logs = logits.logcumsumexp(-1)[..., 1:]
        weights, log_so_far = (logits[..., 1:] - logs).exp(), logs[..., -1]
    return weights.view(flow.shape) * positions.count, log_so_far


def _real_logits(flow: Tensor, positions: Positions) -> Tensor:
    """Logits that leave padding out, (B, H, G, C) -> (B, H, G C)."""
    return (flow if positions.excluded is None else flow.masked_fill(positions.excluded, _EXCLUDED)).flatten(2)


def _exponentials(flow: Tensor, positions: Positions, before: Tensor) -> Tuple[Tensor, Tensor]:
    """exp(flow) and its sums so far, both (B, H, G C); ``before`` (B, H) is the logarithm of the sum before."""
    exponentials = _real_logits(flow, positions).exp()
    return exponentials, exponentials.cumsum(-1) + before.exp().unsqueeze(-1)


def _weight_backward(
    flow: Tensor,
    kind: str,
    positions: Positions,
    earlier: Optional[Tensor],
    bound: float,
    weights: Tensor,
    grad: Tensor,
    grad_log: Tensor,
) -> Tuple[Tensor, Tensor]:
    """Gradients of ``flow`` (B, H, G, C) and ``earlier`` (B, H) by way of what ``_weight_so_far`` makes of them.

    That is ``weights``, whose gradient is ``grad``, both (B, H, G, C), and a logarithm, whose is ``grad_log`` (B, H).
    """
    if kind == "none":
        return torch.zeros_like(flow), grad_log
    if kind == "sigmoid":
        return grad * weights * (1.0 - weights), grad_log
    before = grad_log.new_full(grad_log.shape, _EXCLUDED) if earlier is None else earlier
    if bound > _EXP_BOUND:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (flow, before)]
            results = _weight_so_far(given[0], kind, positions, given[1], bound)
        return torch.autograd.grad(results, given, [grad, grad_log])
    exponentials, so_far = _exponentials(flow, positions, before)
    so_far, of_logit = positive(so_far), (grad * weights).flatten(2)  # (B, H, G C)
    of_sum = grad_log.unsqueeze(-1) / so_far[..., -1:] - from_here(of_logit / so_far)
    of_before = of_sum[..., 0] * before.exp()
    return of_sum.mul_(exponentials).add_(of_logit).view(flow.shape), of_before
