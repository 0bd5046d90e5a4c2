"""Competition and allocation of causal Flow-Attention, softmaxes over the tokens so far, and their gradients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import reverse_cumsum
from ..shared.decayed_cumsum import decayed_cumsum
from ..shared.log_sums import log_cumsum
from ..shared.state import State
from .options import FlowOptions, clamp_flow, excluded_logit, replace_zero_by_one

# Up to this clamp, exp and its sums over any sequence fit float32; for larger clamps, sums are formed as logarithms.
_EXP_BOUND = 30.0


class Positions(NamedTuple):
    """The positions of the tokens of some chunks in their sequence."""

    count: Tensor  # c, the number of real tokens up to each one (B or 1, 1, G, C)
    excluded: Tensor | None  # the tokens that are padding, bool (B or 1, 1, G, C)
    total: Tensor  # real tokens up to the last one (B,)


def flow_weights(
    conserved_incoming: Tensor,
    conserved_outgoing: Tensor,
    positions: Positions,
    options: FlowOptions,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, State]:
    """Competition and allocation (B, H, G, C) from Î and Ô, and the logarithms of the softmaxes' sums so far."""
    start: State = {} if initial_state is None else initial_state
    logits = clamp_flow(conserved_outgoing / positions.count, options.clamp)
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
    initial_state: State | None,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    grad_logs: State,
) -> tuple[Tensor, State]:
    """Gradients of Î and Ô and of the softmaxes' sums before the first token.

    ``conserved`` (2, B, H, G, C) are Î and Ô; ``weights`` and ``grads`` competition and allocation, and their
    gradients; ``grad_logs`` those of the logarithms of the sums after the last token, empty for zeros.
    """
    start: State = {} if initial_state is None else initial_state
    incoming, outgoing = (conserved / positions.count).unbind()
    grad_outgoing, log_competition = _weight_backward(
        clamp_flow(outgoing, options.clamp),
        options.competition,
        positions,
        start.get("log_competition"),
        options.clamp,
        weights[0],
        grads[0],
        grad_logs.get("log_competition"),
    )
    grad_incoming, log_allocation = _weight_backward(
        incoming,
        options.allocation,
        positions,
        start.get("log_allocation"),
        math.inf,
        weights[1],
        grads[1],
        grad_logs.get("log_allocation"),
    )
    grad_outgoing = grad_outgoing.masked_fill(outgoing > options.clamp, 0.0)  # no flow is negative
    grad_conserved = torch.stack([grad_incoming, grad_outgoing]) / positions.count
    return grad_conserved, {"log_competition": log_competition, "log_allocation": log_allocation}


def flow_scale(allocation: Tensor, incoming: Tensor) -> Tensor:
    """The weight of each sink in the last line of Algorithm 2, allocation / I, all (B, H, G, C)."""
    return allocation / replace_zero_by_one(incoming)


def _weight_so_far(
    flow: Tensor, kind: str, positions: Positions, log_before: Tensor | None, bound: float
) -> tuple[Tensor, Tensor]:
    """Weights (B, H, G, C) among the tokens so far, and log Σ exp(flow) over all tokens (B, H).

    The softmax is exp(flow_i) / Σ_{j<=i} exp(flow_j) · c_i; ``log_before`` (B, H) is the logarithm of its sum before
    these tokens, ``excluded_logit`` or None for no tokens. Without a bound on the flow, logarithms are used throughout.
    """
    log_before = flow.new_full(flow.shape[:2], excluded_logit()) if log_before is None else log_before
    if kind == "none":
        return torch.ones_like(flow), log_before
    if kind == "sigmoid":
        return torch.sigmoid(flow), log_before
    if bound <= _EXP_BOUND:
        exponentials, so_far = _exponentials(flow, positions, log_before)
        total = so_far[..., -1]
        # The sum over only padding is 0. Not log().clamp(): the gradient of log at 0 is NaN, clamped or not.
        log_so_far = replace_zero_by_one(total).log().masked_fill(total == 0.0, excluded_logit())
        weights = exponentials / replace_zero_by_one(so_far)
    else:
        logits = _real_logits(flow, positions)  # (B, H, G C)
        logs = log_cumsum(logits, log_before)
        weights, log_so_far = (logits - logs).exp(), logs[..., -1]
    return weights.view(flow.shape) * positions.count, log_so_far


def _real_logits(flow: Tensor, positions: Positions) -> Tensor:
    """The logits without padding, (B, H, G, C) -> (B, H, G C)."""
    return (flow if positions.excluded is None else flow.masked_fill(positions.excluded, excluded_logit())).flatten(2)


def _exponentials(flow: Tensor, positions: Positions, log_before: Tensor) -> tuple[Tensor, Tensor]:
    """exp(flow) and its sums so far, both (B, H, G C); ``log_before`` (B, H) is the logarithm of the sum before."""
    exponentials = _real_logits(flow, positions).exp()
    return exponentials, exponentials.cumsum(-1) + log_before.exp().unsqueeze(-1)


def _weight_backward(
    flow: Tensor,
    kind: str,
    positions: Positions,
    log_before: Tensor | None,
    bound: float,
    weights: Tensor,
    grad: Tensor,
    grad_log: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``flow`` (B, H, G, C) and ``log_before`` (B, H), the arguments of ``_weight_so_far``.

    ``weights`` is its first result and ``grad`` the gradient of that, both (B, H, G, C); ``grad_log`` (B, H) is the
    gradient of its second result, None for zeros.
    """
    grad_log = torch.zeros_like(grad[..., 0, 0]) if grad_log is None else grad_log
    if kind == "none":
        return torch.zeros_like(flow), grad_log
    if kind == "sigmoid":
        return grad * weights * (1.0 - weights), grad_log
    log_before = grad_log.new_full(grad_log.shape, excluded_logit()) if log_before is None else log_before
    grad_logits = (grad * weights).flatten(2)  # (B, H, G C)
    if bound > _EXP_BOUND:
        logits = _real_logits(flow, positions)
        logs = log_cumsum(logits, log_before)
        grad_logits, grad_before = _log_weight_backward(logits, logs, log_before, grad_logits, grad_log)
        grad_flow = grad_logits.view(flow.shape)
        return grad_flow if positions.excluded is None else grad_flow.masked_fill(positions.excluded, 0.0), grad_before
    exponentials, so_far = _exponentials(flow, positions, log_before)
    so_far = replace_zero_by_one(so_far)
    grad_exponentials = grad_log.unsqueeze(-1) / so_far[..., -1:] - reverse_cumsum(grad_logits / so_far)
    grad_before = grad_exponentials[..., 0] * log_before.exp()
    return grad_exponentials.mul_(exponentials).add_(grad_logits).view(flow.shape), grad_before


def _log_weight_backward(
    logits: Tensor, logs: Tensor, log_before: Tensor, grad_log_weights: Tensor, grad_last: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients (B, H, n), (B, H) of ``logits`` and ``log_before``, whose ``log_cumsum`` is ``logs``.

    ``grad_log_weights`` (B, H, n) is the gradient of logits - logs, ``grad_last`` (B, H) that of the last of ``logs``.
    Each log enters later ones through the next log, with the factor exp(logs_i - logs_(i+1)).
    """
    grad_logs = -grad_log_weights
    grad_logs[..., -1] += grad_last
    shares = F.pad(logs[..., :-1] - logs[..., 1:], (0, 1))
    grad_logs = decayed_cumsum(grad_logs.flip(-1), shares.flip(-1), None).flip(-1)
    grad_before = (log_before - logs[..., 0]).exp() * grad_logs[..., 0]
    return torch.addcmul(grad_log_weights, (logits - logs).exp(), grad_logs), grad_before
