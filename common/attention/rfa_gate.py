"""Random feature attention with its gate, as a module."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.rfa import attend
from ..ops.shared.checks import check_padding_mask, check_query_key_value, check_tokens
from ..ops.shared.padding import zero_padding
from ..ops.shared.precision import autocast_off, compute_dtype
from ..ops.shared.state import State
from ._base import drop_sources
from ._options import number
from ._registry import register_attention
from .rfa import RfaAttention, RfaOptions

#: Bias of the gate at first: g is 0.95 and about 20 tokens are remembered. The paper does not say.
_BIAS = 3.0


@dataclass(frozen=True)
class RfaGateOptions(RfaOptions):
    """Options of RFA-Gate; see ``common.ops.rfa_attention``."""

    floor: float = number(
        0.01, "least normaliser; features may be negative. A gated normaliser is at most 1, so RFA's 1 would undo it"
    )


@register_attention("rfa_gate")
class RfaGateAttention(RfaAttention):
    """RFA-Gate (Peng et al., ICLR 2021, section 3.2): RFA that forgets, by a gate of each token and head.

    g = sigmoid(w·x + b) of the token x before its projection; sums are multiplied by g, and what is added by 1 - g.
    x (B, n, D); otherwise as ``RfaAttention``, but causal alone. The released code has no gate.
    """

    Options = RfaGateOptions
    supports = frozenset({"causal"})
    needs = frozenset({"num_heads", "head_dim", "x"})

    def setup(self) -> None:
        super().setup()
        heads, channels = self.shape.num_heads, self.shape.head_dim
        self.gate_proj = nn.Linear(heads * channels, heads)
        nn.init.constant_(self.gate_proj.bias, _BIAS)

    def reset_parameters(self) -> None:
        """All parameters as they are at first."""
        super().reset_parameters()
        self.gate_proj.reset_parameters()
        nn.init.constant_(self.gate_proj.bias, _BIAS)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *,
        x: Tensor,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e), x (B, n, D) -> (B, H, n, e); see ``InnerAttention``."""
        log_gate = self._log_gate(q, k, v, key_padding_mask, x)
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return attend(q, k, drop_sources(v, dropout_p), log_gate=log_gate, **masks, **self._arguments, **self.held())

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        *,
        x: Tensor,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(1) memory and time per token."""
        self._check_next_tokens(q, k, v, padding_mask)
        log_gate = self._log_gate(q, k, v, padding_mask, x)
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        continued = {"initial_state": state, "return_state": True}
        return attend(q, k, v, log_gate=log_gate, **continued, **masks, **self._arguments, **self.held())

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        *,
        x: Tensor,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        scores = [(x * row).sum(-1) + bias for row, bias in zip(self.gate_proj.weight, self.gate_proj.bias)]
        log_gate = -torch.log(1 + torch.exp(-torch.stack(scores, dim=1)))  # (B, H, n)
        return super().reference(q, k, v, key_padding_mask, query_padding_mask, log_gate)

    def _log_gate(self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, x: Tensor) -> Tensor:
        """log g (B, H, n), in float32 or float64 whatever autocast says: over many tokens its errors add up."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("key_padding_mask", padding_mask, k)
        check_tokens(x, q, self.gate_proj.in_features)
        dtype = compute_dtype(q)
        x = zero_padding(x.to(dtype).unsqueeze(1), padding_mask).squeeze(1)  # it must not reach the gradients
        with autocast_off(q):
            gate = F.linear(x, self.gate_proj.weight.to(dtype), self.gate_proj.bias.to(dtype))  # (B, n, H)
        return F.logsigmoid(gate).transpose(1, 2)
