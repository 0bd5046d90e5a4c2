"""Flow-Attention as a module."""

from typing import Final, Optional, Tuple

import torch
from torch import Tensor

from ..ops.checks import State, check_positive_int
from ..ops.flow_attention import (
    FlowOptions,
    flow_attention,
    flow_attention_map,
    flow_attention_scriptable,
    flow_attention_weights,
    flow_options,
)
from .base import InnerAttention, drop_sources


class FlowAttention(InnerAttention):
    """Flow-Attention (Flowformer, ICML 2022, Algorithms 1 and 2); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; arguments, and the ValueErrors they raise, as in
    ``common.ops.flow_attention``.
    """

    causal: Final[bool]
    _options: FlowOptions

    def __init__(
        self,
        causal: bool = False,
        form: str = "released",
        clamp: Optional[float] = 1.0,
        phi: str = "sigmoid",
        competition: str = "softmax",
        allocation: str = "sigmoid",
        chunk_size: int = 64,
    ) -> None:
        super().__init__(causal)
        self._options = flow_options(form, clamp, phi, competition, allocation)
        check_positive_int("chunk_size", chunk_size)
        self.form = form
        self.clamp = clamp
        self.phi = phi
        self.competition = competition
        self.allocation = allocation
        self.chunk_size = chunk_size

    @torch.jit.unused
    def _arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.option_names()}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal:
                raise ValueError("causal is True; allowed in TorchScript: causal=False")
            return flow_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self._options)
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], query_padding_mask: Optional[Tensor]
    ) -> Tensor:
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention(q, k, v, **masks, **self._arguments())

    @torch.jit.unused
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(1) memory and time per token."""
        self._check_causal()
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        return flow_attention(q, k, v, initial_state=state, return_state=True, **masks, **self._arguments())

    @torch.jit.unused
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Competition (B, H, m) and allocation (B, H, n) weights; see ``flow_attention_weights``."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention_weights(q, k, **masks, **self._arguments())

    @torch.jit.unused
    def attention_map(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
    ) -> Tensor:
        """The implied map (B, H, n, m) of a short input; see ``flow_attention_map``."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return flow_attention_map(q, k, **masks, **self._arguments())
