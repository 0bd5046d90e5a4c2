"""Causal Flow-Attention whose sums decay, in plain PyTorch: Algorithm 2 with a gate before each token is added.

Every running sum of Algorithm 2, the softmaxes' sums and the count of tokens are multiplied by exp(log_decay_t) before
token t is added; ``README.md`` derives it. Gates are (B, H, n, 1), by head, or (B, H, n, d), where each channel of the
features has its own count and weights. Letters as in ``__init__.py``; ``g`` in shapes is 1 or d.
"""

import torch
from torch import Tensor

from ..shared.decayed_cumsum import decayed_cumsum
from ..shared.feature_maps import real_features
from ..shared.feature_sums import causal_sums
from ..shared.forgetting import decay_of_real_tokens
from ..shared.log_sums import decayed_log_cumsum
from ..shared.padding import zero_padding
from ..shared.precision import compute_dtype
from ..shared.state import State
from .causal import CausalInputs
from .options import clamp_flow, excluded_logit, replace_zero_by_one


def state_shapes(q: Tensor, v: Tensor, log_decay: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state, for q (B, H, n, d), v (B, H, n, e) and gates of any of the two kinds."""
    vector = (*q.shape[:2], q.shape[3])
    number = vector[:2] if log_decay.dim() == 3 else vector
    sums = dict.fromkeys(("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming"), vector)
    logs = dict.fromkeys(("log_competition", "log_allocation"), number)
    return {"remembered": number, **sums, **logs, "sum_kv": (*vector, v.shape[3])}


def attention_that_forgets(inputs: CausalInputs, log_decay: Tensor) -> tuple[Tensor, State]:
    """The output (B, H, n, e) and the state after the tokens.

    ``log_decay`` is (B, H, n) or (B, H, n, d). O(n (C d + d e)) time; O(n (C + d + e) + (n / C) d e) memory, or, with
    gates by channel, O(n d) in addition to that of ``channel_decayed_sums``.
    """
    v = zero_padding(inputs.v.to(compute_dtype(inputs.v)), inputs.padding)
    flow = _Flow(inputs, log_decay)
    competition, allocation, state = flow.weights()
    # Per channel, R_i = Σ_c q_ic a_ic / (I_i c_ic) · Σ_j Γ_ijc k_jc w_jc v_j.
    q = flow.q * (allocation / (flow.incoming * flow.count))
    before = None if inputs.state is None else inputs.state["sum_kv"]
    out, state["sum_kv"] = flow.values(q, flow.k * competition, v, before)
    return out, state


def weights_that_forget(inputs: CausalInputs, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Competition and allocation (B, H, n), means over the channels if these differ; v is not read."""
    competition, allocation, _ = _Flow(inputs, log_decay).weights()
    return competition.mean(-1), allocation.mean(-1)


class _Flow:
    """The flows of Algorithm 2 with decayed sums. All are means: sums divided by the count.

    Sinks and sources are treated symmetrically, so both are one tensor (B, H, n, 2, ...), sinks first.
    """

    def __init__(self, inputs: CausalInputs, log_decay: Tensor) -> None:
        self.options, self.state, self.chunk_size = inputs.options, inputs.state or {}, inputs.chunk_size
        dtype, self.precision = compute_dtype(inputs.q), inputs.v.dtype
        self.padding = inputs.padding
        self.log_decay = decay_of_real_tokens(log_decay, inputs.padding, dtype)
        self.gates = self.log_decay if log_decay.dim() == 4 else self.log_decay.unsqueeze(-1)  # (B, H, n, g)
        self.q, self.k = (real_features(x.to(dtype), self.options.phi, inputs.padding) for x in (inputs.q, inputs.k))
        ones = zero_padding(torch.ones_like(self.gates), inputs.padding)
        self.remembered = decayed_cumsum(ones, self.gates, self._before("remembered"))  # (B, H, n, g)
        # A real token counts itself, so only before the first one it is 0. No clamp, which at 1 has no gradient.
        self.count = replace_zero_by_one(self.remembered)
        self.receivers = (torch.stack([self.q, self.k], dim=3) + self.options.form.eps) / self.count.unsqueeze(3)
        flows, self.sums = self._received(torch.stack([self.k, self.q], dim=3), ("sum_k", "sum_q"))
        self.incoming, self.outgoing = flows.unbind(3)  # I and O (B, H, n, 1)

    def weights(self) -> tuple[Tensor, Tensor, State]:
        """Competition and allocation (B, H, n, 1 or g), and the state without its sum over values."""
        givers = torch.stack([self.k / self.outgoing, self.q / self.incoming], dim=3)
        flows, sums = self._received(givers, ("sum_k_over_outgoing", "sum_q_over_incoming"))
        incoming, outgoing = flows.unbind(3)  # Î and Ô (B, H, n, 1)
        outgoing = clamp_flow(outgoing, self.options.clamp)
        competition, log_competition = self._weight(outgoing, self.options.competition, "log_competition")
        allocation, log_allocation = self._weight(incoming, self.options.allocation, "log_allocation")
        logs = {"log_competition": log_competition, "log_allocation": log_allocation}
        return competition, allocation, {"remembered": self._last(self.remembered), **self.sums, **sums, **logs}

    def values(self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Σ_(j <= i) Γ_ij (q_i·k_j) v_j (B, H, n, e), and Σ_j Γ_nj k_j v_jᵀ (B, H, d, e) after the last token."""
        state = None if before is None else {"sum_k": torch.zeros_like(before[..., 0]), "sum_kv": before}
        values, _, state = causal_sums(q, k, v, self.chunk_size, state, self.log_decay, self.precision)
        return values, state["sum_kv"]

    def _received(self, givers: Tensor, entries: tuple[str, str]) -> tuple[Tensor, State]:
        """The mean flow into sinks and sources from ``givers`` (B, H, n, 2, d) so far, (B, H, n, 2, 1).

        It is Σ_c (r_ic + eps) (Σ_j Γ_ijc g_jc + eps) / c_ic. Also returns the sums of the givers after the last token,
        with the names ``entries``, (B, H, d) each.
        """
        form, gates = self.options.form, self.gates.unsqueeze(3)
        before = torch.stack([self.state[x] for x in entries], dim=2) if self.state else None
        sums = decayed_cumsum(givers, gates, before)
        flow = torch.linalg.vecdot(self.receivers, sums + form.eps).unsqueeze(-1)
        if form.outer_eps:  # a constant of the whole flow, divided by the count as the flow is
            flow = flow + form.outer_eps * (1.0 / self.count).mean(-1)[..., None, None]
        # Clones, because callers may change the tensors of a state in place: they must share no memory.
        last = (x.clone() for x in sums[:, :, -1].unbind(2))
        return replace_zero_by_one(flow), dict(zip(entries, last))

    def _weight(self, flow: Tensor, kind: str, entry: str) -> tuple[Tensor, Tensor]:
        """Weights among the tokens so far (B, H, n, 1 or g), and the logarithm of their sum after the last token.

        The softmax is exp(flow_i) / Σ_(j <= i) Γ_ij exp(flow_j) · c_i, formed in logarithms.
        """
        before = self._before(entry)
        if before is None:
            before = self.gates.new_full((*self.gates.shape[:2], self.gates.shape[3]), excluded_logit())
        if kind != "softmax":
            weights = torch.ones_like(flow) if kind == "none" else torch.sigmoid(flow)
            return weights, self._entry(before)
        logits = flow.expand_as(self.gates)
        if self.padding is not None:
            logits = logits.masked_fill(self.padding[:, None, :, None], excluded_logit())
        logs = decayed_log_cumsum(logits, self.gates, before)
        return (logits - logs).exp() * self.count, self._last(logs)

    def _before(self, entry: str) -> Tensor | None:
        """An entry of the state before these tokens, as (B, H, g)."""
        if entry not in self.state:
            return None
        x = self.state[entry]
        return x.unsqueeze(-1) if x.dim() == 2 else x

    def _last(self, x: Tensor) -> Tensor:
        """x (B, H, n, g) after the last token, in the shape of a state: (B, H), or (B, H, d) by channel."""
        return self._entry(x[:, :, -1])

    def _entry(self, x: Tensor) -> Tensor:
        return (x.squeeze(-1) if self.log_decay.dim() == 3 else x).clone()
