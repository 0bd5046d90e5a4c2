"""cosFormer as a module."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops.cosformer import MAPS, attend_source, cosformer_attention, source_state
from ..ops.cosformer.reference import cosformer_attention_reference
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, choice, default_of
from ._registry import register_attention


@dataclass(frozen=True)
class CosformerOptions(AttentionOptions):
    """Options of cosFormer; see ``common.ops.cosformer_attention``."""

    phi: str = choice(
        default_of(cosformer_attention, "phi"), MAPS, "feature map of queries and keys; the paper has relu"
    )
    chunk_size: int = causal_chunk_size(cosformer_attention)


@register_attention("cosformer")
class CosformerAttention(OpAttention):
    """Linear attention that falls off with distance, as a cosine, for at most M = ``max_tokens`` tokens.

    M is part of the trained model: weights fall off over M tokens for inputs of any length. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.cosformer_attention``. Raises ValueError for a longer input.
    """

    about = About("cosFormer", "Qin et al., ICLR 2022", "n d²", "2d² + 2d", url="https://arxiv.org/abs/2202.08791")
    Options = CosformerOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "forget"})
    needs = frozenset({"max_tokens"})
    sums_add_up = True
    weighted_mean = True
    op = staticmethod(cosformer_attention)
    reference_op = staticmethod(cosformer_attention_reference)

    def setup(self) -> None:
        self.max_tokens = self.shape.max_tokens  # read by hosts

    def stored_options(self) -> dict[str, Any]:
        """Return the options that every attention records, and M."""
        return {**super().stored_options(), "max_tokens": self.max_tokens}

    def op_kwargs(self) -> dict[str, Any]:
        """M, which is a fact and not an option."""
        return {"max_tokens": self.max_tokens}

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self.options.phi, self.max_tokens)

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, positions, self.options.phi, self.max_tokens)
