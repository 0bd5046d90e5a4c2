"""FAVOR+, the attention of the Performer, as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.favor import LENGTHS, attend, attend_source, draw_directions, source_state
from ..ops.favor.interface import favor_attention_scriptable
from ..ops.favor.reference import favor_attention_reference
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import AttentionOptions, choice, count
from ._registry import register_attention


@dataclass(frozen=True)
class FavorOptions(AttentionOptions):
    """Options of FAVOR+; see ``common.ops.favor_attention``."""

    features: int = count(256, "random directions, and so features of a query or key")
    lengths: str = choice(
        "gaussian", LENGTHS, "of the directions: as Gaussian vectors, or sqrt(d), the paper's regularised kernel"
    )
    redraw: int | None = count(
        None, "draw new directions every so many forward passes in training; 0 for never", optional=True
    )
    chunk_size: int = count(
        64, "tokens computed at once by the causal form: speed and memory, never the result", speed_only=True
    )


@register_attention("favor")
class FavorAttention(OpAttention):
    """FAVOR+ (Performer, ICLR 2021): softmax attention estimated by positive random features; O(n r d).

    ``directions`` (r, d), r = ``features``, is a buffer that all heads share: evaluation repeats, and a state dict has
    it. It is drawn from torch's generator when the module is built, by ``redraw_directions()``, and with ``redraw``
    in training. Shapes and masks as in ``InnerAttention``; options as in ``common.ops.favor_attention``.
    """

    Options = FavorOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "images"})
    needs = frozenset({"head_dim"})
    op = staticmethod(attend)
    reference_op = staticmethod(favor_attention_reference)
    directions: Tensor
    redraws: bool

    def setup(self) -> None:
        super().setup()
        self.redraws = self.options.redraw is not None
        self._passes, self._pass_seed = 0, -1
        self.register_buffer("directions", self._draw())

    def remembered_options(self) -> dict[str, Any]:
        """None: the directions themselves are in the state dict."""
        return {}

    def redraw_directions(self, seed: int | None = None) -> None:
        """New directions, from torch's generator or from ``seed``; decoding states of the old ones end."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.directions = self._draw(generator).to(self.directions)

    def held(self) -> dict[str, Any]:
        """The directions."""
        if self.training and self.redraws:
            self._count_pass()
        return {"directions": self.directions}

    def _op_arguments(self) -> dict[str, Any]:
        return {"causal": self.causal, "chunk_size": self.options.chunk_size}

    def _reference_arguments(self) -> dict[str, Any]:
        return {"causal": self.causal}

    def _draw(self, generator: torch.Generator | None = None) -> Tensor:
        return draw_directions(self.options.features, self.shape.head_dim, self.options.lengths, generator)

    @torch.jit.unused
    def _count_pass(self) -> None:
        """Count this pass, and draw new directions if it is time for them.

        The seed of each pass is from torch's generator. Activation checkpointing repeats a pass with the generator as
        it was: a pass of the same seed is the same pass, and keeps its directions.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        if seed == self._pass_seed:
            return
        self._pass_seed, self._passes = seed, self._passes + 1
        if self._passes % self.options.redraw == 0:
            self.redraw_directions(seed)

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        if self.training and self.redraws:
            raise ValueError("redraw is set; allowed when training in TorchScript: None")
        return favor_attention_scriptable(q, k, v, self.directions, key_padding_mask, query_padding_mask)

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, **self.held())

    def _attend_source(
        self, q: Tensor, state: State, query_padding_mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        return attend_source(q, state, query_padding_mask, self.directions)
