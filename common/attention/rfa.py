"""Random feature attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.rfa import attend_source, rfa_attention, source_state
from ..ops.rfa.reference import rfa_attention_reference
from ..ops.shared.precision import compute_dtype
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, count, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class RfaOptions(AttentionOptions):
    """Options of random feature attention; see ``common.ops.rfa_attention``."""

    features: int = count(64, "random directions r of each head, and so 2r features of a query or key", setup_only=True)
    floor: float = number(
        default_of(rfa_attention, "floor"), "least normaliser; features may be negative (the released code has 1)"
    )
    chunk_size: int = causal_chunk_size(rfa_attention)


@register_attention("rfa")
class RfaAttention(OpAttention):
    """A Gaussian kernel of unit vectors, estimated by sines and cosines, with a learned ``sigma``.

    Directions of each head are Gaussian, times sigma (H, 1, d), which is initially 1. In training they are redrawn in
    each pass from torch's generator; the released code picks one of 500 sets drawn in advance. Evaluation and decoding
    use the buffer ``directions`` (H, r, d), which a state dict holds. Shapes and masks as in ``InnerAttention``;
    options as in ``common.ops.rfa_attention``.
    """

    about = About(
        "RFA",
        "Peng et al., Random Feature Attention, ICLR 2021",
        "n r d",
        "2r d + 2r",
        sizes={"r": "features"},
        url="https://arxiv.org/abs/2103.02143",
    )
    Options = RfaOptions
    supports = frozenset({"causal", "bidirectional", "cross", "source", "forget"})
    needs = frozenset({"num_heads", "head_dim"})
    permutation_equivariant = True
    sums_add_up = True
    op = staticmethod(rfa_attention)
    reference_op = staticmethod(rfa_attention_reference)
    directions: Tensor

    redraws = True

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        self.sigma = nn.Parameter(torch.ones(heads, 1, channels))
        self.register_buffer("directions", torch.randn(heads, self.options.features, channels))

    def reset_parameters(self) -> None:
        """Initialise sigma to 1, and draw new directions."""
        nn.init.ones_(self.sigma)
        nn.init.normal_(self.directions)

    def scaled_directions(self) -> Tensor:
        """The directions of this pass times sigma, (H, r, d)."""
        directions = torch.randn_like(self.directions) if self.training else self.directions
        dtype = compute_dtype(self.sigma)
        return directions.to(dtype) * self.sigma.to(dtype)

    def key_features(self, head_dim: int) -> int:
        """Two features per direction, a sine and a cosine."""
        return 2 * self.options.features

    def op_kwargs(self) -> dict[str, Any]:
        """The directions of this pass."""
        return {"directions": self.scaled_directions()}

    def reference_kwargs(self) -> dict[str, Any]:
        """The directions of this pass, computed literally; in training with the same draws as ``op_kwargs``."""
        directions = torch.randn_like(self.directions) if self.training else self.directions
        return {"directions": torch.stack([rows * scale for rows, scale in zip(directions, self.sigma)])}

    def _source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        return source_state(k, v, key_padding_mask, self._fixed_directions())

    def _attend_source(self, q: Tensor, state: State, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor:
        return attend_source(q, state, padding_mask, self._fixed_directions(), self.options.floor)

    def _fixed_directions(self) -> Tensor:
        """``scaled_directions``, which are the same in the next call; ValueError in training."""
        if self.training:
            raise ValueError("training is True; allowed for source_state and attend_source: evaluation, or forward")
        return self.scaled_directions()
