"""LSH attention of the Reformer as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.reformer import attend, draw_rotations
from ..ops.reformer.interface import check_shared, reformer_attention_scriptable
from ..ops.reformer.reference import reformer_attention_reference
from ._base import OpAttention, drop_sources
from ._options import AttentionOptions, count
from ._registry import register_attention


@dataclass(frozen=True)
class ReformerOptions(AttentionOptions):
    """Options of LSH attention; see ``common.ops.reformer_attention``."""

    rounds: int = count(4, "rounds of hashing; a token attends to what it finds in any")
    directions: int = count(16, "random directions of a round, which has twice as many buckets")
    chunk_size: int = count(
        64, "tokens of a chunk of those sorted by bucket; causal, the last keys of its bucket that a token finds"
    )


@register_attention("reformer")
class ReformerAttention(OpAttention):
    """LSH attention (Reformer, ICLR 2020): softmax over tokens of the same random bucket; O(n log n).

    Queries are the keys: ``k`` is None. ``rotations`` (R, d, D) is a buffer that all heads share: evaluation repeats,
    and a state dict has it. It is drawn from torch's generator when the module is built, and by
    ``redraw_rotations()``. Shapes and masks as in ``InnerAttention``; options as in ``common.ops.reformer_attention``.
    """

    Options = ReformerOptions
    supports = frozenset({"causal", "bidirectional", "images"})
    needs = frozenset({"head_dim"})
    op = staticmethod(attend)
    reference_op = staticmethod(reformer_attention_reference)
    shown_by_weights = frozenset({"rounds", "directions"})  # by the rotations, which are in the state dict
    rotations: Tensor
    chunk_size: int

    def setup(self) -> None:
        super().setup()
        self.chunk_size = self.options.chunk_size
        self.register_buffer("rotations", self._draw())

    def projections(self, head_dim: int) -> dict[str, int]:
        """Queries, which are the keys, and values."""
        return {"q": head_dim, "v": head_dim}

    def redraw_rotations(self, seed: int | None = None) -> None:
        """New rotations, from torch's generator or from ``seed``; decoding states of the old ones end."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.rotations = self._draw(generator).to(self.rotations)

    def held(self) -> dict[str, Any]:
        """The rotations."""
        return {"rotations": self.rotations}

    def _op_arguments(self) -> dict[str, Any]:
        return {"causal": self.causal, "chunk_size": self.options.chunk_size}

    def _reference_arguments(self) -> dict[str, Any]:
        return self._op_arguments()

    def _draw(self, generator: torch.Generator | None = None) -> Tensor:
        return draw_rotations(self.options.rounds, self.shape.head_dim, self.options.directions, generator)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q (B, H, n, d), k None, v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal or k is not None:
                raise ValueError("causal is True or k is a tensor; allowed in TorchScript: neither")
            masks = (key_padding_mask, query_padding_mask)
            return reformer_attention_scriptable(q, v, self.rotations, masks[0], masks[1], self.chunk_size)
        else:
            return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    def _check_next_tokens(self, q: Tensor, k: None, v: Tensor, padding_mask: Tensor | None) -> None:
        check_shared(q, k, v)
        super()._check_next_tokens(q, q, v, padding_mask)
