"""Multi-head attention with a kernel other than softmax: an ablation in FLASH's Tables 1 and 2."""

from dataclasses import dataclass

from ..ops.quadratic import gau_attention
from ..ops.quadratic.reference import gau_attention_reference
from ..ops.shared.score_kernels import SCORE_KERNELS
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class QuadraticOptions(AttentionOptions):
    """Options of ``common.ops.gau_attention``."""

    kernel: str = choice(
        default_of(gau_attention, "kernel"), SCORE_KERNELS, "what turns scores into weights (FLASH, Table 2)"
    )
    divisor: float | None = number(
        None,
        "what scores are divided by; by default the number of real tokens that the query sees",
        optional=True,
    )


@register_attention("quadratic")
class QuadraticAttention(OpAttention):
    """Attention with relu², softmax or Laplace scores, without bias; no parameters, O(n) memory.

    ``gau_attention`` per head: kernel(q·k / divisor) v. Self-attention only. Shapes and masks as in ``InnerAttention``;
    ``divisor`` and ``kernel``, and the ValueErrors they raise, as in ``gau_attention``.
    """

    about = About(
        "quadratic relu² attention",
        "Hua et al., FLASH, ICML 2022, section 2",
        "n² d",
        "2n d",
        url="https://arxiv.org/abs/2202.10447",
    )
    Options = QuadraticOptions
    supports = frozenset({"causal", "bidirectional"})
    linear_cost = False
    permutation_equivariant = True
    op = staticmethod(gau_attention)
    reference_op = staticmethod(gau_attention_reference)
