"""Random feature attention with its gate, as a module."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..modules.linear_weights import weights_of
from ..ops.rfa import rfa_gate_attention
from ..ops.rfa.reference import rfa_gate_attention_reference
from ._options import About, default_of, number
from ._registry import register_attention
from .rfa import RfaAttention, RfaOptions

#: Initial bias of the gate: g is 0.95 and about 20 tokens are remembered. The paper does not specify it.
_BIAS = 3.0


@dataclass(frozen=True)
class RfaGateOptions(RfaOptions):
    """Options of RFA-Gate; see ``common.ops.rfa_attention``."""

    floor: float = number(
        default_of(rfa_gate_attention, "floor"),
        "least normaliser; features may be negative. A gated normaliser is at most 1, so RFA's 1 would undo it",
    )


@register_attention("rfa_gate")
class RfaGateAttention(RfaAttention):
    """RFA that forgets, by a gate of each token and head; only causal.

    g = sigmoid(w·x + b) of the token x before its projection; sums are multiplied by g, and new terms by 1 - g.
    x (B, n, D); otherwise as ``RfaAttention``, but only causal. The released code has no gate.
    """

    about = About(
        "RFA-Gate",
        "Peng et al., Random Feature Attention, ICLR 2021, section 3.2",
        "n r d",
        "2r d + 2r",
        sizes={"r": "features"},
        url="https://arxiv.org/abs/2103.02143",
    )
    Options = RfaGateOptions
    supports = frozenset({"causal"})
    needs = frozenset({"num_heads", "head_dim", "x"})
    sums_add_up = False
    permutation_equivariant = False
    op = staticmethod(rfa_gate_attention)
    reference_op = staticmethod(rfa_gate_attention_reference)

    def setup(self) -> None:
        super().setup()
        heads, channels = self.shape.num_heads, self.shape.head_dim
        self.gate_proj = nn.Linear(heads * channels, heads)
        nn.init.constant_(self.gate_proj.bias, _BIAS)

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        super().reset_parameters()
        self.gate_proj.reset_parameters()
        nn.init.constant_(self.gate_proj.bias, _BIAS)

    def op_kwargs(self) -> dict[str, Any]:
        """The directions of this pass, and the gate's weights."""
        weight, bias = weights_of(self.gate_proj)
        return {**super().op_kwargs(), "gate_weight": weight, "gate_bias": bias}

    def reference_kwargs(self) -> dict[str, Any]:
        """The directions and the gate's weights, for the literal form."""
        gate = {"gate_weight": self.gate_proj.weight, "gate_bias": self.gate_proj.bias}
        return {**super().reference_kwargs(), **gate}
