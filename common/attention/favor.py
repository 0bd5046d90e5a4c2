"""FAVOR+, the attention of the Performer, as a module."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.favor import LENGTHS, attend_source, draw_directions, favor_attention, source_state
from ..ops.favor.reference import favor_attention_reference
from ..ops.shared.state import State
from ..ops.shared.tracing import is_exported
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, choice, count
from ._registry import register_attention

#: The most passes between a pass and its repetition, by whose number it is known.
_REPEATABLE = 1024


@dataclass(frozen=True)
class FavorOptions(AttentionOptions):
    """Options of FAVOR+; see ``common.ops.favor_attention``."""

    features: int = count(256, "random directions, and so features of a query or key", setup_only=True)
    lengths: str = choice(
        "gaussian",
        LENGTHS,
        "of the directions: as Gaussian vectors, or sqrt(d), the paper's regularised kernel",
        setup_only=True,
    )
    redraw: int | None = count(
        None,
        "draw new directions every so many forward passes in training; 0 for never",
        optional=True,
        setup_only=True,
    )
    chunk_size: int = causal_chunk_size(favor_attention)


@register_attention("favor")
class FavorAttention(OpAttention):
    """Softmax attention estimated by positive random features.

    ``directions`` (r, d), r = ``features``, is a buffer that all heads share and a state dict holds, so evaluation is
    deterministic. It is drawn from torch's generator when the module is built, and by ``redraw_directions()``. With
    ``redraw``, training uses separate ``training_directions``, which are redrawn every ``redraw`` passes. They are not
    in the state dict, since averages of them (EMA, averaged checkpoints) would not be valid directions. They follow
    from ``directions`` and the number of passes, which a state dict records: a resumed training has the same ones, and
    so do all processes of one training. Shapes and masks as in ``InnerAttention``; options as in
    ``common.ops.favor_attention``.
    """

    about = About(
        "FAVOR+",
        "Choromanski et al., Performer, ICLR 2021",
        "n r d",
        "r d + r",
        sizes={"r": "features"},
        url="https://arxiv.org/abs/2009.14794",
    )
    Options = FavorOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "forget"})
    needs = frozenset({"head_dim"})
    sums_add_up = True
    permutation_equivariant = True
    weighted_mean = True
    op = staticmethod(favor_attention)
    reference_op = staticmethod(favor_attention_reference)
    shown_by_weights = frozenset({"features", "lengths", "redraw"})  # from the directions in the state dict
    counts = ("passes",)
    directions: Tensor
    redraws: bool
    passes: int = 0  # counted in training with ``redraw``

    def setup(self) -> None:
        self._numbers: dict[int, int] = {}  # of the last passes, which checkpointing may repeat
        self.redraws = self.options.redraw is not None
        self.register_buffer("directions", self._draw())
        if self.redraws:
            self.register_buffer("training_directions", self.directions.clone(), persistent=False)

    def reset_parameters(self) -> None:
        """Draw new directions, and count passes from 0."""
        self.passes = 0
        self.redraw_directions()

    def redraw_directions(self, seed: int | None = None) -> None:
        """Draw new directions from torch's generator or from ``seed``; earlier decoding states become invalid."""
        self.directions = self._draw(seed).to(self.directions)
        self._draw_for_training()

    def key_features(self, head_dim: int) -> int:
        """Number of random features."""
        return self.options.features

    def op_kwargs(self) -> dict[str, Any]:
        """The directions."""
        if not (self.training and self.redraws):
            return {"directions": self.directions}
        return {"directions": self._directions_of_pass()}

    def restore_counts(self, counts: dict[str, int]) -> None:
        """Resume at the pass that the loaded weights were saved at."""
        self.passes = counts.get("passes", 0)
        self._draw_for_training()

    def _draw(self, seed: int | None = None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return draw_directions(self.options.features, self.shape.head_dim, self.options.lengths, generator)

    def _draw_for_training(self) -> None:
        """Set the directions of the next pass."""
        if self.redraws and not self.directions.is_meta:
            self.training_directions = self._drawn_for(self.passes)

    def _drawn_for(self, number_of_pass: int) -> Tensor:
        """The directions of a pass: those of evaluation before the first draw, then new ones per seed."""
        draws = number_of_pass // self.options.redraw
        numbers = self.directions.double().cpu().numpy().tobytes()
        directions = self._draw(zlib.crc32(numbers) + draws) if draws else self.directions.clone()
        return directions.to(self.directions)

    def _directions_of_pass(self) -> Tensor:
        """Count a new pass, with new directions every ``redraw`` passes; a repeated one has its own.

        Each pass draws a number from torch's generator. Activation checkpointing repeats a pass with the generator
        restored: one with the number of an earlier pass is that pass.
        """
        if is_exported():
            raise ValueError(
                f"redraw is {self.options.redraw!r} in training; allowed in torch.export, and so in torch's automatic "
                "pipelining: None, or evaluation, since a graph counts no passes. Stages cut by hand may redraw"
            )
        number = int(torch.randint(1, 2**62, (), device="cpu"))
        if number in self._numbers:
            repeated = self._numbers[number]
            same = repeated // self.options.redraw == self.passes // self.options.redraw
            return self.training_directions if same else self._drawn_for(repeated)
        self.passes += 1
        self._numbers[number] = self.passes
        if len(self._numbers) > _REPEATABLE:
            del self._numbers[next(iter(self._numbers))]
        if self.passes % self.options.redraw == 0:
            self._draw_for_training()
        return self.training_directions

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, **self.op_kwargs())

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self.directions)
