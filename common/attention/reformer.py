"""LSH attention of the Reformer as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.reformer import draw_rotations, reformer_attention
from ..ops.reformer.decoding import most_held
from ..ops.reformer.reference import reformer_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count
from ._registry import register_attention


@dataclass(frozen=True)
class ReformerOptions(AttentionOptions):
    """Options of LSH attention; see ``common.ops.reformer_attention``."""

    rounds: int = count(4, "rounds of hashing; a token attends to what it finds in any", setup_only=True)
    directions: int = count(16, "random directions of a round, which has twice as many buckets", setup_only=True)
    chunk_size: int = count(
        64, "tokens of a chunk of those sorted by bucket; causal, the last keys of its bucket that a token finds"
    )


@register_attention("reformer")
class ReformerAttention(OpAttention):
    """Softmax over the tokens that random rotations put into the same bucket.

    Queries are also the keys: ``k`` is None. ``rotations`` (R, d, D) is a buffer that all heads share and a state dict
    holds, so evaluation is deterministic. It is drawn from torch's generator when the module is built, and by
    ``redraw_rotations()``. Shapes and masks as in ``InnerAttention``; options as in ``common.ops.reformer_attention``.
    """

    about = About(
        "LSH attention of the Reformer",
        "Kitaev et al., Reformer, ICLR 2020",
        "n log(n) + n r C d",
        "min(n, 32r C) (2d + 2r) + 64r",
        sizes={"r": "rounds", "C": "chunk_size"},
        url="https://arxiv.org/abs/2001.04451",
    )
    Options = ReformerOptions
    supports = frozenset({"causal", "bidirectional"})
    needs = frozenset({"head_dim"})
    op_inputs = ("q", "v")
    op = staticmethod(reformer_attention)
    reference_op = staticmethod(reformer_attention_reference)
    permutation_equivariant = True  # if no bucket is larger than a chunk
    shown_by_weights = frozenset({"rounds", "directions"})  # from the rotations in the state dict
    rotations: Tensor

    def setup(self) -> None:
        self.register_buffer("rotations", self._draw())

    def reset_parameters(self) -> None:
        """Draw new rotations."""
        self.redraw_rotations()

    def state_tokens(self) -> int:
        """One chunk for each bucket of each round: later tokens attend to no others."""
        return most_held(self.rotations, self.options.chunk_size)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of queries, which are also the keys, and values."""
        return {"q": head_dim, "v": head_dim}

    def redraw_rotations(self, seed: int | None = None) -> None:
        """Draw new rotations from torch's generator or from ``seed``; earlier decoding states become invalid."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.rotations = self._draw(generator).to(self.rotations)

    def op_kwargs(self) -> dict[str, Any]:
        """The rotations."""
        return {"rotations": self.rotations}

    def _draw(self, generator: torch.Generator | None = None) -> Tensor:
        return draw_rotations(self.options.rounds, self.shape.head_dim, self.options.directions, generator)
