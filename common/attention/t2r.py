"""T2R as a module: linear attention with a learned feature map for each head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.shared.state import State
from ..ops.t2r import attend_source, source_state, t2r_attention
from ..ops.t2r.reference import t2r_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, count, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class T2rOptions(AttentionOptions):
    """Options of T2R; see ``common.ops.t2r_attention``."""

    features: int = count(32, "features of a query or key in each head", setup_only=True)
    floor: float = number(default_of(t2r_attention, "floor"), "least normaliser; relu may leave a query without one")
    chunk_size: int = causal_chunk_size(t2r_attention)


@register_attention("t2r")
class T2rAttention(OpAttention):
    """Linear attention with learned features relu(W x + b) of queries and keys.

    Queries and keys of a head share one map, ``map_weight`` (H, f, d) and ``map_bias`` (H, f), initialised as in
    ``nn.Linear``. Only this map has to be added to convert a trained softmax attention to a linear one. Shapes and
    masks as in ``InnerAttention``; options as in ``common.ops.t2r_attention``.
    """

    about = About(
        "T2R",
        "Kasai et al., Transformer to RNN, EMNLP 2021",
        "n f d",
        "f d + f",
        sizes={"f": "features"},
        url="https://arxiv.org/abs/2103.13076",
    )
    Options = T2rOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source"})
    needs = frozenset({"num_heads", "head_dim"})
    sums_add_up = True
    permutation_equivariant = True
    weighted_mean = True
    op = staticmethod(t2r_attention)
    reference_op = staticmethod(t2r_attention_reference)

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        self.map_weight = nn.Parameter(torch.empty(heads, self.options.features, channels))
        self.map_bias = nn.Parameter(torch.empty(heads, self.options.features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the maps as ``nn.Linear`` does."""
        bound = self.shape.head_dim**-0.5
        nn.init.uniform_(self.map_weight, -bound, bound)
        nn.init.uniform_(self.map_bias, -bound, bound)

    def linear_weights(self) -> tuple[str, ...]:
        """The weight of the maps."""
        return ("map_weight",)

    def op_kwargs(self) -> dict[str, Any]:
        """The parameters of the feature maps."""
        return {"map_weight": self.map_weight, "map_bias": self.map_bias}

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.map_weight, self.map_bias)

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self.map_weight, self.map_bias, self.options.floor)
