"""Linear attention as a module, the baseline of every table."""

from typing import Final, Optional, Tuple

import torch
from torch import Tensor

from ..ops.checks import State, check_choice, check_positive_int
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.linear_attention import linear_attention, linear_attention_scriptable
from .base import InnerAttention, drop_sources


class LinearAttention(InnerAttention):
    """Linear attention (Katharopoulos et al., ICML 2020); no parameters, O(n d²).

    Shapes and masks as in ``InnerAttention``; arguments, and the ValueErrors they raise, as in
    ``common.ops.linear_attention``.
    """

    causal: Final[bool]

    def __init__(self, causal: bool = False, phi: str = "elu+1", chunk_size: int = 64) -> None:
        super().__init__(causal)
        check_choice("phi", phi, FEATURE_MAPS)
        check_positive_int("chunk_size", chunk_size)
        self.phi = phi
        self.chunk_size = chunk_size

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
            return linear_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, self.phi)
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], query_padding_mask: Optional[Tensor]
    ) -> Tensor:
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return linear_attention(q, k, v, causal=self.causal, phi=self.phi, chunk_size=self.chunk_size, **masks)

    @torch.jit.unused
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(1) memory and time per token."""
        self._check_causal()
        return linear_attention(
            q, k, v, causal=True, phi=self.phi, chunk_size=self.chunk_size, key_padding_mask=padding_mask,
            query_padding_mask=padding_mask, initial_state=state, return_state=True,
        )  # fmt: skip
