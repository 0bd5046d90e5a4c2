"""Multi-head attention with another kernel than softmax: an ablation of FLASH's Tables 1 and 2."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.quadratic import attend
from ..ops.quadratic.reference import gau_attention_reference
from ..ops.shared.checks import check_padding_mask, check_query_key_value
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import cleared
from ..ops.shared.score_kernels import SCORE_KERNELS
from ..ops.shared.state import State
from ._base import InnerAttention, drop_sources
from ._options import AttentionOptions, choice, number
from ._registry import register_attention


@dataclass(frozen=True)
class QuadraticOptions(AttentionOptions):
    """Options of ``common.ops.gau_attention``."""

    kernel: str = choice("relu2", SCORE_KERNELS, "what turns scores into weights (FLASH, Table 2)")
    divisor: float | None = number(
        None,
        "what scores are divided by; by default the number of real tokens that the query sees",
        optional=True,
    )


@register_attention("quadratic")
class QuadraticAttention(InnerAttention):
    """``gau_attention`` per head, without bias: kernel(q·k / divisor) v; no parameters, O(n²) time, O(n) memory.

    Self-attention only. Shapes and masks as in ``InnerAttention``, ``divisor`` and ``kernel``, and the ValueErrors they
    raise, as in ``gau_attention``.
    """

    Options = QuadraticOptions
    supports = frozenset({"causal", "bidirectional"})
    state_is_constant_size = False

    def setup(self) -> None:
        self._arguments = {"causal": self.causal, **self.options.as_dict()}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        q = zero_padding(q, query_padding_mask)  # what stands in padding must not reach any gradient
        out = attend(q, k, drop_sources(v, dropout_p), key_padding_mask=key_padding_mask, **self._arguments)
        return zero_padding(out, query_padding_mask)

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        out = gau_attention_reference(q, k, v, key_padding_mask=key_padding_mask, **self._arguments)
        return cleared(out, query_padding_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state, every token so far; see ``gau_attention``."""
        self._check_next_tokens(q, k, v, padding_mask)
        masks = {"key_padding_mask": padding_mask}
        return attend(q, k, v, initial_state=state, return_state=True, **masks, **self._arguments)
