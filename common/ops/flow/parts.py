"""Causal Flow-Attention of one part of a sequence, while its other parts are computed at the same time.

Algorithm 2 is four running sums, each weighted by the results of the previous ones: Σ k and Σ q; Σ k / O and Σ q / I;
the softmax's Σ exp(Ô); Σ k w vᵀ. Each earlier part contributes one total to each sum, O(d e) numbers per head whatever
its length. Within a part, the sums run over its tokens, in plain PyTorch. Letters as in ``__init__.py``.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..shared.feature_maps import real_features
from ..shared.feature_sums import causal_sums
from ..shared.log_sums import log_cumsum
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from .options import FlowOptions, clamp_flow, excluded_logit, replace_zero_by_one


class SumsBefore(Protocol):
    """Turns the sum of a part into the sum over the parts before it; all parts call it, in the same order."""

    def __call__(self, own: Tensor, log_unit: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Σ of ``own`` (B, H, ...) over the parts before, and the logarithm of its unit.

        ``own`` is in units of exp(``log_unit``), (B, H), without gradient; None is 1 for both.
        """


def flow_attention_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    options: FlowOptions,
    chunk_size: int,
    before: Tensor,
    sums_before: SumsBefore,
) -> Tensor:
    """``flow_attention`` (causal) of the tokens q, k (B, H, n, d), v (B, H, n, e) of a part: (B, H, n, e) in v's dtype.

    ``padding_mask`` (B, n), True = padding, gives 0. ``before``, int64 (B,), counts the real tokens of earlier parts.
    O(n (C d + d e)) time and O(n (C + d + e) + (n / C) d e) memory with C = ``chunk_size``; several times that of
    ``flow_attention``, which has a hand-written backward pass. Arguments are not checked.
    """
    with autocast_off(q):
        return _Part(q, k, padding_mask, options, before, sums_before).output(v, chunk_size).to(v.dtype)


class _Part:
    """The flows of a part. Sinks and sources are one tensor (B, H, n, 2, ...), sinks first."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None,
        options: FlowOptions,
        before: Tensor,
        sums_before: SumsBefore,
    ) -> None:
        self.options, self.padding, self.sums_before = options, padding, sums_before
        self.q, self.k = (real_features(x.to(compute_dtype(q)), options.phi, padding) for x in (q, k))
        real = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device) if padding is None else ~padding
        count = before[:, None] + real.cumsum(1)
        self.count = count.clamp(min=1).to(self.q.dtype)[:, None, :, None]  # (B, 1, n, 1)
        self.receivers = (torch.stack([self.q, self.k], dim=3) + options.form.eps) / self.count.unsqueeze(3)

    def output(self, v: Tensor, chunk_size: int) -> Tensor:
        """R (B, H, n, e) of values v (B, H, n, e)."""
        incoming, outgoing = self._received(torch.stack([self.k, self.q], dim=3))  # I and O (B, H, n, 1)
        givers = torch.stack([self.k / outgoing, self.q / incoming], dim=3)
        conserved_incoming, conserved_outgoing = self._received(givers)
        conserved_outgoing = clamp_flow(conserved_outgoing, self.options.clamp)
        k = self.k * self._weight(conserved_outgoing, self.options.competition)
        q = self.q * (self._weight(conserved_incoming, self.options.allocation) / (incoming * self.count))
        v = zero_padding(v.to(self.q.dtype), self.padding)
        sum_kv, _ = self.sums_before(k.transpose(-2, -1) @ v)
        state = {"sum_k": torch.zeros_like(sum_kv[..., 0]), "sum_kv": sum_kv}
        return causal_sums(q, k, v, chunk_size, state)[0]

    def _received(self, givers: Tensor) -> tuple[Tensor, Tensor]:
        """The mean flow into sinks and sources from ``givers`` (B, H, n, 2, d) so far, (B, H, n, 1) each."""
        form = self.options.form
        before, _ = self.sums_before(givers.sum(2))  # (B, H, 2, d)
        sums = givers.cumsum(2) + before.unsqueeze(2)
        flow = torch.linalg.vecdot(self.receivers, sums + form.eps).unsqueeze(-1)
        if form.outer_eps:
            flow = flow + form.outer_eps / self.count.unsqueeze(3)
        sinks, sources = replace_zero_by_one(flow).unbind(3)
        return sinks, sources

    def _weight(self, flow: Tensor, kind: str) -> Tensor:
        """Weights (B, H, n, 1) among the tokens so far; the softmax is exp(flow_i) / Σ_(j <= i) exp(flow_j) · c_i."""
        if kind != "softmax":
            return torch.ones_like(flow) if kind == "none" else torch.sigmoid(flow)
        logits = flow.squeeze(-1)
        if self.padding is not None:
            logits = logits.masked_fill(self.padding[:, None], excluded_logit())
        log_unit = logits.detach().amax(-1)  # (B, H)
        exponentials = zero_padding((logits - log_unit.unsqueeze(-1)).exp().unsqueeze(-1), self.padding)
        before, log_unit = self.sums_before(exponentials.sum((2, 3)), log_unit)  # (B, H)
        log_before = replace_zero_by_one(before).log() + log_unit
        log_before = log_before.masked_fill(before == 0.0, excluded_logit())
        return (logits - log_cumsum(logits, log_before)).exp().unsqueeze(-1) * self.count
