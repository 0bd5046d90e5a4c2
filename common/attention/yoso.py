"""YOSO-E as a module."""

from dataclasses import dataclass

from ..ops.yoso import GRADIENTS, yoso_attention
from ..ops.yoso.reference import yoso_attention_reference
from ._base import OpAttention
from ._options import AttentionOptions, choice, count, default_of
from ._registry import register_attention


@dataclass(frozen=True)
class YosoOptions(AttentionOptions):
    """Options of YOSO-E; see ``common.ops.yoso_attention``."""

    tau: int = count(
        default_of(yoso_attention, "tau"),
        "hyperplanes of a hash: the larger, the faster weights fall off with the angle",
    )
    gradient: str = choice(
        default_of(yoso_attention, "gradient"), GRADIENTS, "of the weights: the paper's lower bound, or exact"
    )


@register_attention("yoso")
class YosoAttention(OpAttention):
    """YOSO-E (Zeng et al., ICML 2021): the probability of equal hashes; no parameters, O(n² d) time, O(n) memory.

    Outputs are unit vectors of each head. Decoding keeps every key and value. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.yoso_attention``.
    """

    Options = YosoOptions
    supports = frozenset({"causal", "bidirectional", "cross"})
    linear_cost = False
    op = staticmethod(yoso_attention)
    reference_op = staticmethod(yoso_attention_reference)
