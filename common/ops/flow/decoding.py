"""One token of causal Flow-Attention after a state: the few operations that a chunk of one token needs.

Algorithm 2 with all sums in the state. Sinks and sources are one tensor (B, H, 2, ...), the *sides*, sinks first. For
the newest token, the softmax over the tokens so far is a sigmoid: exp(x) / (S + exp(x)) = sigmoid(x - log S).
"""

import torch
from torch import Tensor

from ..shared.feature_maps import feature_map
from ..shared.log_sums import log_add
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
    of_sink, of_source = features.unbind(2)
    receivers = features + form.eps if form.eps else features
    sum_k, sum_q = state["sum_k"] + of_source, state["sum_q"] + of_sink
    flow = _received(receivers, sum_k, sum_q, form)  # I and O, not divided by c
    # The form's eps keeps every flow above 0.
    inverse_flow = count.unsqueeze(-1) / (flow if form.eps else replace_zero_by_one(flow))
    over_incoming, over_outgoing = inverse_flow.unsqueeze(-1).unbind(2)  # c / I and c / O (B, H, 1)
    sum_k_out = torch.addcmul(state["sum_k_over_outgoing"], of_source, over_outgoing)
    sum_q_in = torch.addcmul(state["sum_q_over_incoming"], of_sink, over_incoming)
    incoming, outgoing = (_received(receivers, sum_k_out, sum_q_in, form) / count.unsqueeze(-1)).unbind(2)  # Î and Ô
    outgoing = clamp_flow(outgoing, options.clamp)
    competition, log_competition = _newest_weight(outgoing, options.competition, state["log_competition"], count)
    allocation, log_allocation = _newest_weight(incoming, options.allocation, state["log_allocation"], count)
    weighted = in_dtype(v, dtype) * competition[:, :, None, None]
    sum_kv = torch.addcmul(state["sum_kv"], of_source.unsqueeze(-1), weighted)
    scale = (allocation / count).unsqueeze(-1) * over_incoming
    sums = {"sum_k": sum_k, "sum_q": sum_q, "sum_k_over_outgoing": sum_k_out, "sum_q_over_incoming": sum_q_in}
    logs = {"log_competition": log_competition, "log_allocation": log_allocation}
    out = (of_sink * scale).unsqueeze(2) @ sum_kv
    return out, {"count": total, **sums, **logs, "sum_kv": sum_kv}


def _received(receivers: Tensor, of_sources: Tensor, of_sinks: Tensor, form: FlowForm) -> Tensor:
    """Flows (B, H, 2) into sink and source, from ``receivers`` (B, H, 2, d) with eps and the givers' sums (B, H, d)."""
    sums = torch.stack([of_sources, of_sinks], dim=2)
    flow = torch.linalg.vecdot(receivers, sums + form.eps if form.eps else sums)
    return flow + form.outer_eps if form.outer_eps else flow


def _newest_weight(logit: Tensor, kind: str, log_before: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of the newest token among all so far and the logarithm of their sum, all (B, H); ``count`` (B, 1)."""
    if kind == "softmax":
        return torch.sigmoid(logit - log_before) * count, log_add(log_before, logit)
    return torch.ones_like(logit) if kind == "none" else torch.sigmoid(logit), log_before
