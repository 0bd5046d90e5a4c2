"""cosFormer as a module."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops.cosformer import attend, attend_source, source_state
from ..ops.cosformer.interface import MAPS, cosformer_attention_scriptable
from ..ops.cosformer.reference import cosformer_attention_reference
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import AttentionOptions, choice, count
from ._registry import register_attention


@dataclass(frozen=True)
class CosformerOptions(AttentionOptions):
    """Options of cosFormer; see ``common.ops.cosformer_attention``."""

    phi: str = choice("relu", MAPS, "feature map of queries and keys; the paper has relu")
    chunk_size: int = count(
        64, "tokens computed at once by the causal form: speed and memory, never the result", speed_only=True
    )


@register_attention("cosformer")
class CosformerAttention(OpAttention):
    """cosFormer (Qin et al., ICLR 2022) for at most M = ``max_tokens`` tokens; no parameters, O(n d²).

    M is part of the trained model: weights fall off over M tokens, however long the input is. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.cosformer_attention``. Raises ValueError for a longer input.
    """

    Options = CosformerOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "images"})
    needs = frozenset({"max_tokens"})
    op = staticmethod(attend)
    reference_op = staticmethod(cosformer_attention_reference)
    phi: str
    max_tokens: int

    def setup(self) -> None:
        super().setup()
        self.phi, self.max_tokens = self.options.phi, self.shape.max_tokens

    def remembered_options(self) -> dict[str, Any]:
        """Its options and M."""
        return {**super().remembered_options(), "max_tokens": self.max_tokens}

    def held(self) -> dict[str, Any]:
        """M, which is no option but a fact."""
        return {"max_tokens": self.max_tokens}

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        return cosformer_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self.phi, self.max_tokens)

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.phi, self.max_tokens)

    def _attend_source(
        self, q: Tensor, state: State, query_padding_mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        return attend_source(q, state, query_padding_mask, positions, self.phi, self.max_tokens)
