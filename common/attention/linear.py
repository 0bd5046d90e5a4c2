"""Linear attention as a module, the baseline of every table."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.linear import CUMULATIVE_SUMS, attend_source, linear_attention, source_state
from ..ops.linear.reference import linear_attention_reference
from ..ops.shared.feature_maps import FEATURE_MAPS
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, choice, default_of
from ._registry import register_attention


@dataclass(frozen=True)
class LinearAttentionOptions(AttentionOptions):
    """Options of linear attention; see ``common.ops.linear_attention``."""

    phi: str = choice(default_of(linear_attention, "phi"), FEATURE_MAPS, "feature map of queries and keys")
    chunk_size: int = causal_chunk_size(linear_attention)
    cumulative_sum: str = choice(
        default_of(linear_attention, "cumulative_sum"),
        CUMULATIVE_SUMS,
        "how the causal form sums over earlier tokens: matmul, chunk by chunk; scan, token by token; never the result",
        speed_only=True,
    )


@register_attention("linear")
class LinearAttention(OpAttention):
    """Attention with a feature map in place of softmax; no parameters.

    Shapes and masks as in ``InnerAttention``; options as in ``common.ops.linear_attention``.
    """

    about = About(
        "linear attention", "Katharopoulos et al., ICML 2020", "n d²", "d² + d", url="https://arxiv.org/abs/2006.16236"
    )
    Options = LinearAttentionOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "forget"})
    sums_add_up = True
    permutation_equivariant = True
    weighted_mean = True
    op = staticmethod(linear_attention)
    reference_op = staticmethod(linear_attention_reference)

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.options.phi)

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self.options.phi)
