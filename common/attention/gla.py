"""Gated linear attention as a module."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..modules.linear_weights import weights_of
from ..ops.gla import gla_attention
from ..ops.gla.reference import gla_attention_reference
from ._options import About, AttentionOptions, causal_chunk_size, count, default_of, number
from ._output_gate import OutputGateAttention, output_gate, output_norm
from ._registry import register_attention


@dataclass(frozen=True)
class GlaOptions(AttentionOptions):
    """Options of gated linear attention; see ``common.ops.gla_attention``."""

    key_channels: int | None = count(
        None,
        "channels of a head's queries and keys; by default half of those of its values",
        optional=True,
        setup_only=True,
    )
    gate_rank: int = count(16, "rank of the projection from tokens to the gate", setup_only=True)
    temperature: float = number(
        default_of(gla_attention, "temperature"),
        "the gate is sigmoid(...)^(1 / temperature): the higher, the longer is remembered at first",
    )
    output_norm: str = output_norm("group")
    output_gate: str = output_gate("swish")
    chunk_size: int = causal_chunk_size(gla_attention)


@register_attention("gla")
class GlaAttention(OutputGateAttention):
    """A sum that forgets each channel of the keys by a gate of the token; only causal.

    α = sigmoid(W₂ W₁ x + b)^(1/16) of the token x before its projection, W₁ and W₂ of rank 16; queries and keys have
    half as many channels as values. Each head's output goes through LayerNorm and a swish gate of the token (the
    released code has the norm "rms"). O(n d (C + d)). x (B, n, D); other shapes and masks as in
    ``InnerAttention``, options as in ``common.ops.gla_attention`` and ``OutputGateAttention``.
    """

    about = About(
        "gated linear attention",
        "Yang et al., ICML 2024",
        "n (C + d) d",
        "d² / 2",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2312.06635",
    )
    Options = GlaOptions
    supports = frozenset({"causal"})
    op = staticmethod(gla_attention)
    reference_op = staticmethod(gla_attention_reference)
    gate_bias = True

    def setup(self) -> None:
        heads, head_dim = self.shape.num_heads, self.shape.head_dim
        self.gate_down_proj = nn.Linear(heads * head_dim, self.options.gate_rank, bias=False)
        self.gate_up_proj = nn.Linear(self.options.gate_rank, heads * self.projections(head_dim)["q"])
        self.build_output()

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head: by default half as many for queries and keys as for values."""
        channels = self.options.key_channels or max(head_dim // 2, 1)
        return {"q": channels, "k": channels, "v": head_dim}

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.gate_down_proj.reset_parameters()
        self.gate_up_proj.reset_parameters()
        self.reset_output()

    def op_kwargs(self) -> dict[str, Any]:
        """The gate's weights."""
        (down, _), (up, bias) = weights_of(self.gate_down_proj), weights_of(self.gate_up_proj)
        return {"gate_down": down, "gate_up": up, "gate_bias": bias}
