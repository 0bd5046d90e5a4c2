"""Multi-head attention with another kernel than softmax: an ablation of FLASH's Tables 1 and 2."""

from typing import Optional, Tuple

from torch import Tensor

from ..ops.checks import State, check_choice, check_padding_mask, check_query_key_value
from ..ops.chunks import zero_padding
from ..ops.gau_attention import gau_attention
from ..ops.score_kernels import SCORE_KERNELS
from .base import InnerAttention, drop_sources


class QuadraticAttention(InnerAttention):
    """``gau_attention`` per head, without bias: kernel(q·k / divisor) v; no parameters, O(n²) time, O(n) memory.

    Self-attention only. Shapes and masks as in ``InnerAttention``, ``divisor`` and ``kernel``, and the ValueErrors they
    raise, as in ``gau_attention``.
    """

    state_is_constant_size = False

    def __init__(self, causal: bool = False, kernel: str = "relu2", divisor: Optional[float] = None) -> None:
        super().__init__(causal)
        check_choice("kernel", kernel, SCORE_KERNELS)
        self.kernel = kernel
        self.divisor = divisor

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        options = {"causal": self.causal, "kernel": self.kernel, "divisor": self.divisor}
        out = gau_attention(q, k, drop_sources(v, dropout_p), key_padding_mask=key_padding_mask, **options)
        return zero_padding(out, query_padding_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state, every token so far; see ``gau_attention``."""
        self._check_causal()
        options = {"causal": True, "kernel": self.kernel, "divisor": self.divisor}
        return gau_attention(
            q, k, v, key_padding_mask=padding_mask, initial_state=state, return_state=True, **options
        )  # fmt: skip
