"""Flow-Attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.flow import attend, flow_attention_map, flow_attention_weights
from ..ops.flow.full import flow_attention_scriptable
from ..ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS, FlowOptions, check_competition, flow_options
from ..ops.flow.reference import flow_attention_reference
from ..ops.shared.checks import check_both_masks
from ..ops.shared.feature_maps import FEATURE_MAPS
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import AttentionOptions, choice, count, number
from ._registry import register_attention


@dataclass(frozen=True)
class SharedFlowOptions(AttentionOptions):
    """Options of Flow-Attention and of `flow_source` alike."""

    form: str = choice(
        "released",
        tuple(FORMS),
        "paper: Algorithms 1 and 2 of the Flowformer paper to the letter; released: the authors' scaling, 1e-6 and "
        "clamp, which released weights need; released_vision: their image model's extra 1e-6 as well",
    )
    clamp: float | None = number(
        1.0,
        "bound on the conserved outgoing flow in the released forms: 1 in the authors' core module and image model, 5 "
        "in their language model, inf for none; the form paper has none and ignores it",
        optional=True,
    )
    phi: str = choice("sigmoid", FEATURE_MAPS, "feature map of queries and keys (Table 10 of the Flowformer paper)")


@dataclass(frozen=True)
class FlowAttentionOptions(SharedFlowOptions):
    """Options of Flow-Attention; see ``common.ops.flow_attention``."""

    competition: str = choice(
        "softmax",
        COMPETITIONS,
        "how sources compete, none being an ablation (Table 11); softmax_heads, not causal: over the heads of each "
        "source, as the authors' long-range-arena code does",
    )
    allocation: str = choice("sigmoid", ALLOCATIONS, "how sinks are gated, none being an ablation (Table 11)")
    chunk_size: int = count(
        64, "tokens computed at once by the causal form: speed and memory, never the result", speed_only=True
    )


@register_attention("flow")
class FlowAttention(OpAttention):
    """Flow-Attention (Flowformer, ICML 2022, Algorithms 1 and 2); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; options as in ``common.ops.flow_attention``.
    """

    Options = FlowAttentionOptions
    supports = frozenset({"causal", "bidirectional", "cross", "images"})
    op = staticmethod(attend)
    reference_op = staticmethod(flow_attention_reference)
    _flow_options: FlowOptions

    def setup(self) -> None:
        names = ("form", "clamp", "phi", "competition", "allocation")
        self._flow_options = flow_options(*(getattr(self.options, name) for name in names))
        check_competition(self._flow_options, self.causal)
        super().setup()

    def _op_arguments(self) -> dict[str, Any]:
        return {"causal": self.causal, "options": self._flow_options, "chunk_size": self.options.chunk_size}

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        check_both_masks(key_padding_mask, query_padding_mask)
        return flow_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self._flow_options)

    @torch.jit.unused
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Competition (B, H, m) and allocation (B, H, n) weights, after ``state`` when decoding.

        See ``common.ops.flow_attention_weights``.
        """
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention_weights(q, k, causal=self.causal, initial_state=state, **masks, **self.options.as_dict())

    #: What ``record_attention`` keeps of a call.
    recorded_weights = weights

    @torch.jit.unused
    def attention_map(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The implied map (B, H, n, m) of a short input; see ``common.ops.flow_attention_map``."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention_map(q, k, causal=self.causal, **masks, **self.options.as_dict())
