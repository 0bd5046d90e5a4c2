"""One token of causal Flow-Attention after a state: the few operations that a chunk of one token leaves.

Algorithm 2 with all sums in the state. Sinks and sources are one tensor (B, H, 2, ...), the *sides*, sinks first. The
softmax over the tokens so far is a sigmoid for the newest one: exp(x) / (S + exp(x)) = sigmoid(x - log S).
"""

import torch
from torch import Tensor

from ..shared.feature_maps import feature_map
from ..shared.precision import compute_dtype, in_dtype
from ..shared.state import State
from .causal import CausalInputs
from .options import FlowForm, clamp_flow, replace_zero_by_one


def step(inputs: CausalInputs) -> tuple[Tensor, State]:
    """``attention_in_chunks`` of one token without padding, after a state; O(d e).

    q, k (B, H, 1, d), v (B, H, 1, e) -> (B, H, 1, e) and the next state.
    """
    q, k, v, _, options, _, state = inputs
    form, dtype = options.form, compute_dtype(q)
    total = state["count"] + 1
    count = total.to(dtype)[:, None]  # c (B, 1)
    features = feature_map(in_dtype(torch.cat([q, k], dim=2), dtype), options.phi)
    receivers, givers = features + form.eps if form.eps else features, features.flip(2)
    sums = torch.stack([state["sum_k"], state["sum_q"]], dim=2) + givers
    flow = _received(receivers, sums, form)  # I and O, not divided by c
    # The form's eps keeps every flow above 0.
    inverse_flow = count.unsqueeze(-1) / (flow if form.eps else replace_zero_by_one(flow))  # c / I and c / O
    sums_inverse = torch.stack([state["sum_k_over_outgoing"], state["sum_q_over_incoming"]], dim=2)
    sums_inverse = torch.addcmul(sums_inverse, givers, inverse_flow.flip(2).unsqueeze(-1))
    incoming, outgoing = (_received(receivers, sums_inverse, form) / count.unsqueeze(-1)).unbind(2)  # Î and Ô (B, H)
    outgoing = clamp_flow(outgoing, options.clamp)
    competition, log_competition = _newest_weight(outgoing, options.competition, state["log_competition"], count)
    allocation, log_allocation = _newest_weight(incoming, options.allocation, state["log_allocation"], count)
    weighted = in_dtype(v, dtype) * competition[:, :, None, None]
    sum_kv = torch.addcmul(state["sum_kv"], features[:, :, 1, :, None], weighted)
    scale = allocation * inverse_flow[:, :, 0] / count
    out = features[:, :, :1] @ sum_kv * scale[:, :, None, None]
    return out, {
        "count": total,
        "sum_k": sums[:, :, 0],
        "sum_q": sums[:, :, 1],
        "sum_k_over_outgoing": sums_inverse[:, :, 0],
        "sum_q_over_incoming": sums_inverse[:, :, 1],
        "log_competition": log_competition,
        "log_allocation": log_allocation,
        "sum_kv": sum_kv,
    }


def _received(receivers: Tensor, sums: Tensor, form: FlowForm) -> Tensor:
    """The flow (B, H, 2) that receivers (B, H, 2, d), with eps, get from the sums of their givers (B, H, 2, d)."""
    flow = torch.linalg.vecdot(receivers, sums + form.eps if form.eps else sums)
    return flow + form.outer_eps if form.outer_eps else flow


def _newest_weight(logit: Tensor, kind: str, log_before: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The newest token's weight among those so far and the logarithm of their sum, all (B, H); ``count`` (B, 1)."""
    if kind == "softmax":
        return torch.sigmoid(logit - log_before) * count, torch.logaddexp(log_before, logit)
    return torch.ones_like(logit) if kind == "none" else torch.sigmoid(logit), log_before
