"""Hedgehog as a module: linear attention with learned features that imitate softmax weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.hedgehog import attend_source, hedgehog_attention, source_state
from ..ops.hedgehog.reference import hedgehog_attention_reference
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, count
from ._registry import register_attention


@dataclass(frozen=True)
class HedgehogOptions(AttentionOptions):
    """Options of Hedgehog; see ``common.ops.hedgehog_attention``."""

    rows: int | None = count(
        None,
        "rows of each head's map, which give twice as many features; 0, the default: the channels of a head",
        optional=True,
        setup_only=True,
    )
    chunk_size: int = causal_chunk_size(hedgehog_attention)


@register_attention("hedgehog")
class HedgehogAttention(OpAttention):
    """Linear attention with learned features that imitate softmax weights.

    Features are softmax(W x + b) and softmax(-W x - b). Queries and keys of each head have their own maps,
    ``query_weight`` and ``key_weight`` (H, r, d) and ``query_bias`` and ``key_bias`` (H, r), initialised to the
    identity. Shapes and masks as in ``InnerAttention``; options as in ``common.ops.hedgehog_attention``.
    """

    about = About(
        "Hedgehog",
        "Zhang et al., ICLR 2024",
        "2n r d",
        "2r d + 2r",
        sizes={"r": "rows"},
        url="https://arxiv.org/abs/2402.04347",
    )
    Options = HedgehogOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source"})
    needs = frozenset({"num_heads", "head_dim"})
    sums_add_up = True
    permutation_equivariant = True
    weighted_mean = True
    shown_by_weights = frozenset({"rows"})
    op = staticmethod(hedgehog_attention)
    reference_op = staticmethod(hedgehog_attention_reference)

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        rows = self.options.rows or channels
        for name in ("query", "key"):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(heads, rows, channels)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(heads, rows)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the maps to ``torch.eye(r, d)``, with zero bias."""
        for name in ("query", "key"):
            weight = getattr(self, f"{name}_weight")
            with torch.no_grad():
                weight.copy_(torch.eye(*weight.shape[1:]))
            nn.init.zeros_(getattr(self, f"{name}_bias"))

    def linear_weights(self) -> tuple[str, ...]:
        """The weights of the maps."""
        return ("query_weight", "key_weight")

    def op_kwargs(self) -> dict[str, Any]:
        """The parameters of the feature maps."""
        names = ("query_weight", "query_bias", "key_weight", "key_bias")
        return {name: getattr(self, name) for name in names}

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.key_weight, self.key_bias)

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self.query_weight, self.query_bias)
