"""Flow-Attention of a decoder's queries to a source, as a module."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.flow_source import (
    ALLOCATIONS,
    COMPETITIONS,
    attend_source,
    flow_source_attention,
    flow_source_options,
    source_state,
)
from ..ops.flow_source.reference import flow_source_attention_reference
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, choice, default_of
from ._registry import register_attention
from .flow import SharedFlowOptions


@dataclass(frozen=True)
class FlowSourceOptions(SharedFlowOptions):
    """Options of Flow-Attention to a source; see ``common.ops.flow_source_attention``."""

    competition: str = choice(
        default_of(flow_source_attention, "competition"), COMPETITIONS, "how sources compete, none being an ablation"
    )
    allocation: str = choice(
        default_of(flow_source_attention, "allocation"),
        ALLOCATIONS,
        "how each target is gated by itself, none being an ablation",
    )


@register_attention("flow_source")
class FlowSourceAttention(OpAttention):
    """Flow-Attention to another sequence, for the cross-attention of a decoder; no parameters.

    Ordinary Flow-Attention would let a target token see later ones through the outgoing flow. Here competition and
    outgoing flow depend on the source only, with ``source_q`` (B, H, m, d), queries of its own tokens. Shapes and masks
    as in ``InnerAttention``; options as in ``common.ops.flow_source_attention``.
    """

    about = About(
        "Flow-Attention to a source",
        "our own, in none of the papers",
        "n d²",
        map="the weights, with competition and allocation in them",
    )
    Options = FlowSourceOptions
    supports = frozenset({"cross", "source"})
    needs = frozenset({"source_q"})
    permutation_equivariant = True
    op = staticmethod(flow_source_attention)
    reference_op = staticmethod(flow_source_attention_reference)

    def setup(self) -> None:
        self._flow_options = flow_source_options(**self.options.as_dict())

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, *, source_q: Tensor) -> State:
        return source_state(k, v, key_padding_mask, source_q, self._flow_options)

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self._flow_options)
