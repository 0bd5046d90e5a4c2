"""Flow-Attention as a module."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..ops.checks import check_positive_int
from ..ops.flow_attention import flow_attention, flow_attention_map, flow_attention_weights
from ..ops.flow_attention_full import flow_attention_scriptable
from ..ops.flow_options import FlowOptions, flow_options
from .base import OpAttention


class FlowAttention(OpAttention):
    """Flow-Attention (Flowformer, ICML 2022, Algorithms 1 and 2); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; arguments, and the ValueErrors they raise, as in
    ``common.ops.flow_attention``.
    """

    op = staticmethod(flow_attention)
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

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], query_padding_mask: Optional[Tensor]
    ) -> Tensor:
        return flow_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self._options)

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
