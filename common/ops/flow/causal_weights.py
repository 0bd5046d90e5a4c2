"""Competition and allocation of causal Flow-Attention, softmaxes over the tokens so far."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
