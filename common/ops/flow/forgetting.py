"""Causal Flow-Attention whose sums forget, in plain PyTorch: Algorithm 2 with a gate before each token is added.

Every running sum of Algorithm 2, the softmaxes' sums and the count of tokens are multiplied by exp(log_decay_t) before
token t is added; ``README.md`` derives it. Gates are (B, H, n, 1), by head, or (B, H, n, d), where each channel of the
features has its own count and weights. Letters as in ``__init__.py``; ``g`` in shapes is 1 or d.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import decayed_cumsum
from ..shared.feature_maps import real_features
from ..shared.feature_sums import causal_sums
from ..shared.forgetting import decay_of_real_tokens
from ..shared.padding import zero_padding
from ..shared.precision import compute_dtype
from ..shared.state import State
from .causal import CausalInputs
from .options import FlowForm, clamp_flow, excluded_logit, replace_zero_by_one


def state_shapes(q: Tensor, v: Tensor, log_decay: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state, for q (B, H, n, d), v (B, H, n, e) and gates of any of the two kinds."""
    vector = (*q.shape[:2], q.shape[3])
    number = vector[:2] if log_decay.dim() == 3 else vector
    sums = dict.fromkeys(("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming"), vector)
    logs = dict.fromkeys(("log_competition", "log_allocation"), number)
    return {"remembered": number, **sums, **logs, "sum_kv": (*vector, v.shape[3])}


def attention_that_forgets(inputs: CausalInputs, log_decay: Tensor) -> tuple[Tensor, State]:
    """The output (B, H, n, e) and the state after the tokens; O(n (C d + d e)) time.

    ``log_decay`` is (B, H, n) or (B, H, n, d).
    """
    v = zero_padding(inputs.v.to(compute_dtype(inputs.v)), inputs.padding)
    flow = _Flow(inputs, log_decay)
    competition, allocation, state = flow.weights()
    # Per channel, R_i = Σ_c q_ic a_ic / (I_i c_ic) · Σ_j Γ_ijc k_jc w_jc v_j.
    q = flow.q * allocation / (flow.incoming * flow.count)
    before = None if inputs.state is None else inputs.state["sum_kv"]
    out, state["sum_kv"] = flow.sums(q, flow.k * competition, v, before)
    return out, state


def weights_that_forget(inputs: CausalInputs, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Competition and allocation (B, H, n), the means over the channels where each has its own; v is not read."""
    competition, allocation, _ = _Flow(inputs, log_decay).weights()
    return competition.mean(-1), allocation.mean(-1)


class _Flow:
    """The flows of Algorithm 2 over what is remembered. All are means: sums divided by the count."""

    def __init__(self, inputs: CausalInputs, log_decay: Tensor) -> None:
        self.options, self.state, self.chunk_size = inputs.options, inputs.state or {}, inputs.chunk_size
        dtype = compute_dtype(inputs.q)
        self.log_decay = decay_of_real_tokens(log_decay, inputs.padding, dtype)
        self.gates = self.log_decay if log_decay.dim() == 4 else self.log_decay.unsqueeze(-1)  # (B, H, n, g)
        self.padding = inputs.padding
        self.q, self.k = (real_features(x.to(dtype), self.options.phi, inputs.padding) for x in (inputs.q, inputs.k))
        ones = zero_padding(torch.ones_like(self.gates), inputs.padding)
        self.remembered = decayed_cumsum(ones, self.gates, self._before("remembered"))  # (B, H, n, g)
        # A real token counts itself, so only before the first one is there less than 1.
        self.count = self.remembered.clamp(min=1.0)
        self.incoming, self.sum_k = self._received(self.q, self.k, "sum_k")
        self.outgoing, self.sum_q = self._received(self.k, self.q, "sum_q")

    def weights(self) -> tuple[Tensor, Tensor, State]:
        """Competition and allocation (B, H, n, 1 or g), and the state without its sum over values."""
        incoming, sum_k_out = self._received(self.q, self.k / self.outgoing, "sum_k_over_outgoing")  # Î
        outgoing, sum_q_in = self._received(self.k, self.q / self.incoming, "sum_q_over_incoming")  # Ô
        outgoing = clamp_flow(outgoing, self.options.clamp)
        competition, log_competition = self._weight(outgoing, self.options.competition, "log_competition")
        allocation, log_allocation = self._weight(incoming, self.options.allocation, "log_allocation")
        state = {
            "remembered": self._last(self.remembered),
            "sum_k": self.sum_k,
            "sum_q": self.sum_q,
            "sum_k_over_outgoing": sum_k_out,
            "sum_q_over_incoming": sum_q_in,
            "log_competition": log_competition,
            "log_allocation": log_allocation,
        }
        return competition, allocation, state

    def sums(self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Σ_(j <= i) Γ_ij (q_i·k_j) v_j (B, H, n, e), and Σ_j Γ_nj k_j v_jᵀ (B, H, d, e) after the last token."""
        state = None if before is None else {"sum_k": torch.zeros_like(before[..., 0]), "sum_kv": before}
        values, _, state = causal_sums(q, k, v, self.chunk_size, state, self.log_decay)
        return values, state["sum_kv"]

    def _received(self, receivers: Tensor, givers: Tensor, entry: str) -> tuple[Tensor, Tensor]:
        """What each of ``receivers`` gets of ``givers`` so far, a mean (B, H, n, 1), and the givers' sum (B, H, d).

        Σ_c (r_ic + eps) (Σ_j Γ_ijc g_jc + eps) / c_ic, both (B, H, n, d).
        """
        form, before = self.options.form, self._before(entry)
        receivers = (receivers + form.eps) / self.count
        no_values = givers.new_zeros(*givers.shape[:3], 0)
        state = None if before is None else {"sum_k": before, "sum_kv": before.new_zeros(*before.shape, 0)}
        _, flow, state = causal_sums(receivers, givers, no_values, self.chunk_size, state, self.log_decay)
        flow = flow + form.eps * receivers.sum(-1, keepdim=True) + _outer(form, self.count)
        return replace_zero_by_one(flow), state["sum_k"]

    def _weight(self, flow: Tensor, kind: str, entry: str) -> tuple[Tensor, Tensor]:
        """Weights among what is remembered (B, H, n, 1 or g), and the logarithm of their sum after the last token.

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
        logs = _decayed_logcumsumexp(logits, self.gates, before)
        return (logits - logs).exp() * self.count, self._last(logs)

    def _before(self, entry: str) -> Tensor | None:
        """An entry of the state before these tokens, (B, H, d) or (B, H, g)."""
        if entry not in self.state:
            return None
        x = self.state[entry]
        return x.unsqueeze(-1) if x.dim() == 2 else x

    def _last(self, x: Tensor) -> Tensor:
        """x (B, H, n, g) after the last token, as a state has it: (B, H), or (B, H, d) by channel."""
        return self._entry(x[:, :, -1])

    def _entry(self, x: Tensor) -> Tensor:
        return (x.squeeze(-1) if self.log_decay.dim() == 3 else x).clone()


def _outer(form: FlowForm, count: Tensor) -> Tensor | float:
    """The form's constant of a whole flow, divided by the count as the flow is: the mean over the channels' counts."""
    return form.outer_eps * (1.0 / count).mean(-1, keepdim=True) if form.outer_eps else 0.0


def _decayed_logcumsumexp(x: Tensor, log_decay: Tensor, before: Tensor) -> Tensor:
    """log Σ_(j <= i) Γ_ij exp(x_j) for x, ``log_decay`` (B, H, n, g) and the logarithm ``before`` (B, H, g).

    Sums are in units of exp(m), m the largest logit so far, which decays too: so nothing overflows, and what is
    forgotten hides nothing. Rounding of m changes the unit alone.
    """
    first = before.unsqueeze(2)
    since_start = F.pad(log_decay, (0, 0, 1, 0)).cumsum(2)
    with torch.no_grad():
        unit = (torch.cat([first, x], dim=2) - since_start).cummax(2).values + since_start  # (B, H, 1 + n, g)
        decay = unit[:, :, :-1] - unit[:, :, 1:]
    start = (before - unit[:, :, 0]).exp()
    total = decayed_cumsum((x - unit[:, :, 1:]).exp(), log_decay + decay, start)
    return unit[:, :, 1:] + total.log()
