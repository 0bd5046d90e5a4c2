"""BigBird's attention as a module."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops.bigbird import attend, draw_numbers
from ..ops.bigbird.interface import bigbird_attention_scriptable
from ..ops.bigbird.reference import bigbird_attention_reference
from ._base import OpAttention
from ._options import AttentionOptions, count
from ._registry import register_attention


@dataclass(frozen=True)
class BigbirdOptions(AttentionOptions):
    """Options of BigBird's attention; see ``common.ops.bigbird_attention``."""

    chunk_size: int = count(64, "tokens of a chunk, which the paper calls a block: part of the model")
    random_chunks: int | None = count(
        3,
        "random chunks that each chunk sees besides its neighbours, the first and the last; 0 for none",
        optional=True,
    )


@register_attention("bigbird")
class BigbirdAttention(OpAttention):
    """Softmax over neighbouring, first, last and random chunks (Zaheer et al., NeurIPS 2020); O(n (5 + r) C d).

    Not causal. ``numbers`` (1024, r) is a buffer, drawn from torch's generator when the module is built, that chooses
    the random chunks, the same for all heads: evaluation repeats, and a state dict has it. An image is the sequence of
    its rows. Shapes and masks as in ``InnerAttention``; options as in ``common.ops.bigbird_attention``.
    """

    Options = BigbirdOptions
    supports = frozenset({"bidirectional", "images"})
    op = staticmethod(attend)
    reference_op = staticmethod(bigbird_attention_reference)
    numbers: Tensor
    chunk_size: int

    def setup(self) -> None:
        super().setup()
        self.chunk_size = self.options.chunk_size
        self.register_buffer("numbers", draw_numbers(self.options.random_chunks or 0))

    def held(self) -> dict[str, Any]:
        """The numbers that choose random chunks."""
        return {"numbers": self.numbers}

    def _op_arguments(self) -> dict[str, Any]:
        return {"chunk_size": self.options.chunk_size}

    _reference_arguments = _op_arguments

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        return bigbird_attention_scriptable(
            q, k, v, self.numbers, key_padding_mask, query_padding_mask, self.chunk_size
        )
