"""Linear attention as a module, the baseline of every table."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.linear import attend, attend_source, source_state
from ..ops.linear.interface import linear_attention_scriptable
from ..ops.linear.reference import linear_attention_reference
from ..ops.shared.feature_maps import FEATURE_MAPS
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import AttentionOptions, choice, count
from ._registry import register_attention


@dataclass(frozen=True)
class LinearAttentionOptions(AttentionOptions):
    """Options of linear attention; see ``common.ops.linear_attention``."""

    phi: str = choice("elu+1", FEATURE_MAPS, "feature map of queries and keys")
    chunk_size: int = count(
        64, "tokens computed at once by the causal form: speed and memory, never the result", speed_only=True
    )


@register_attention("linear")
class LinearAttention(OpAttention):
    """Linear attention (Katharopoulos et al., ICML 2020); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; options as in ``common.ops.linear_attention``.
    """

    Options = LinearAttentionOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "images"})
    op = staticmethod(attend)
    reference_op = staticmethod(linear_attention_reference)
    phi: str

    def setup(self) -> None:
        super().setup()
        self.phi = self.options.phi

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        return linear_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self.phi)

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.phi)

    def _attend_source(
        self, q: Tensor, state: State, query_padding_mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        return attend_source(q, state, query_padding_mask, self.phi)
