"""YOSO-E as a module."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.yoso import attend
from ..ops.yoso.interface import GRADIENTS, yoso_attention_scriptable
from ..ops.yoso.reference import yoso_attention_reference
from ._base import OpAttention
from ._options import AttentionOptions, choice, count
from ._registry import register_attention


@dataclass(frozen=True)
class YosoOptions(AttentionOptions):
    """Options of YOSO-E; see ``common.ops.yoso_attention``."""

    tau: int = count(9, "hyperplanes of a hash: the larger, the faster weights fall off with the angle")
    gradient: str = choice("bound", GRADIENTS, "of the weights: the paper's lower bound, or exact")


@register_attention("yoso")
class YosoAttention(OpAttention):
    """YOSO-E (Zeng et al., ICML 2021): the probability of equal hashes; no parameters, O(n² d) time, O(n) memory.

    Outputs are unit vectors of each head. Decoding keeps every key and value. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.yoso_attention``.
    """

    Options = YosoOptions
    supports = frozenset({"causal", "bidirectional", "cross", "images"})
    state_is_constant_size = False
    op = staticmethod(attend)
    reference_op = staticmethod(yoso_attention_reference)
    tau: int
    gradient: str

    def setup(self) -> None:
        super().setup()
        self.tau, self.gradient = self.options.tau, self.options.gradient

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        return yoso_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self.tau, self.gradient)
