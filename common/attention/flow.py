"""Flow-Attention as a module."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..ops.flow import flow_attention, flow_attention_map, flow_attention_of_part, flow_attention_weights
from ..ops.flow.full import flow_attention_in_graph
from ..ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS, FlowOptions, flow_options
from ..ops.flow.parts import SumsBefore
from ..ops.flow.reference import flow_attention_reference
from ..ops.shared.checks import check_both_masks
from ..ops.shared.feature_maps import FEATURE_MAPS
from ..ops.shared.state import State
from ._base import OpAttention, drop_sources
from ._options import About, AttentionOptions, causal_chunk_size, choice, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class SharedFlowOptions(AttentionOptions):
    """Options that Flow-Attention and `flow_source` share."""

    form: str = choice(
        default_of(flow_attention, "form"),
        tuple(FORMS),
        "paper: Algorithms 1 and 2 of the Flowformer paper to the letter; released: the authors' scaling, 1e-6 and "
        "clamp, which released weights need; released_vision: their image model's extra 1e-6 as well",
    )
    clamp: float | None = number(
        default_of(flow_attention, "clamp"),
        "bound on the conserved outgoing flow in the released forms: 1 in the authors' core module and image model, 5 "
        "in their language model, inf for none; the form paper has none and ignores it",
        optional=True,
    )
    phi: str = choice(
        default_of(flow_attention, "phi"),
        FEATURE_MAPS,
        "feature map of queries and keys (Table 10 of the Flowformer paper)",
    )


@dataclass(frozen=True)
class FlowAttentionOptions(SharedFlowOptions):
    """Options of Flow-Attention; see ``common.ops.flow_attention``."""

    competition: str = choice(
        default_of(flow_attention, "competition"),
        COMPETITIONS,
        "how sources compete, none being an ablation (Table 11); softmax_heads, not causal: over the heads of each "
        "source, as the authors' long-range-arena code does",
    )
    allocation: str = choice(
        default_of(flow_attention, "allocation"), ALLOCATIONS, "how sinks are gated, none being an ablation (Table 11)"
    )
    chunk_size: int = causal_chunk_size(flow_attention)


@register_attention("flow")
class FlowAttention(OpAttention):
    """Linear attention in which sources compete for sinks, and flow is conserved; no parameters.

    Shapes and masks as in ``InnerAttention``; options as in ``common.ops.flow_attention``.
    """

    about = About(
        "Flow-Attention",
        "Wu et al., Flowformer, ICML 2022, Algorithms 1 and 2",
        "n d²",
        "d² + 4d",
        map="the weights, with competition and allocation in them",
        url="https://arxiv.org/abs/2202.06258",
    )
    Options = FlowAttentionOptions
    supports = frozenset({"causal", "bidirectional", "cross", "torchscript", "forget"})
    permutation_equivariant = True
    op = staticmethod(flow_attention)
    reference_op = staticmethod(flow_attention_reference)
    causal: Final[bool]
    _flow_options: FlowOptions  # for TorchScript

    def setup(self) -> None:
        self._flow_options = flow_options(*(getattr(self.options, name) for name in FlowOptions._fields), self.causal)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        log_decay: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``.

        ``log_decay``, causal: see ``common.ops.flow_attention``.
        """
        if torch.jit.is_scripting():
            if self.causal or segment_ids is not None:
                raise ValueError("causal is True or segment_ids is given; allowed in TorchScript: neither")
            check_both_masks(key_padding_mask, query_padding_mask)
            v = drop_sources(v, dropout_p)
            return flow_attention_in_graph(q, k, v, key_padding_mask, query_padding_mask, self._flow_options)
        else:  # a separate branch, which TorchScript does not compile
            masks = key_padding_mask, query_padding_mask
            return super().forward(q, k, v, *masks, dropout_p, segment_ids, log_decay=log_decay)

    def apply_step(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, log_decay: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """``extend`` by one token of a known kind; see ``OpAttention``."""
        if log_decay is not None:
            masks = dict.fromkeys(("key_padding_mask", "query_padding_mask"))
            return self.apply_op(q, k, v, **masks, log_decay=log_decay, initial_state=state, return_state=True)
        return flow_attention.step(q, k, v, state, self._flow_options)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        state: State | None = None,
        log_decay: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Competition (B, H, m) and allocation (B, H, n) weights; in decoding, of the tokens after ``state``.

        See ``common.ops.flow_attention_weights``. ``segment_ids`` raise ValueError: record one document at a time.
        """
        if segment_ids is not None:
            raise ValueError("segment_ids is given; allowed with competition and allocation: one document in each row")
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        gates = {"initial_state": state, "log_decay": log_decay}
        return flow_attention_weights(q, k, causal=self.causal, **gates, **masks, **self.options.as_dict())

    def attend_part(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, before: Tensor, sums_before: SumsBefore
    ) -> Tensor:
        """The output of one part, while all parts are computed at the same time; see ``flow_attention_of_part``."""
        return flow_attention_of_part(
            q, k, v, padding_mask, self._flow_options, self.options.chunk_size, before, sums_before
        )

    #: The weights that ``record_attention`` records for each call.
    recorded_weights = weights

    def attention_map(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """The implied map (B, H, n, m) of a short input; see ``common.ops.flow_attention_map``."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention_map(q, k, causal=self.causal, log_decay=log_decay, **masks, **self.options.as_dict())
