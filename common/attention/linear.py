"""Linear attention as a module, the baseline of every table."""

from typing import Optional

from torch import Tensor

from ..ops.checks import check_choice, check_positive_int
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.linear_attention import linear_attention, linear_attention_scriptable
from .base import OpAttention


class LinearAttention(OpAttention):
    """Linear attention (Katharopoulos et al., ICML 2020); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; arguments, and the ValueErrors they raise, as in
    ``common.ops.linear_attention``.
    """

    op = staticmethod(linear_attention)

    def __init__(self, causal: bool = False, phi: str = "elu+1", chunk_size: int = 64) -> None:
        super().__init__(causal)
        check_choice("phi", phi, FEATURE_MAPS)
        check_positive_int("chunk_size", chunk_size)
        self.phi = phi
        self.chunk_size = chunk_size

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], query_padding_mask: Optional[Tensor]
    ) -> Tensor:
        return linear_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self.phi)
