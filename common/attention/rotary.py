"""Rotary positions around any inner attention."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..ops.checks import State, check_padding_mask, check_query_key_value, state_entry
from ..positions import check_even, rotate, token_positions
from .base import InnerAttention


class RotaryAttention(InnerAttention):
    """Rotates queries and keys by their position among the real tokens (RoFormer) before ``inner`` sees them.

    Shapes and masks as in ``InnerAttention``; the state is the inner one's and ``rotary_count`` (B,), real tokens so
    far. The head dimension must be even (ValueError otherwise).
    """

    def __init__(self, inner: InnerAttention, head_dim: int) -> None:
        super().__init__(inner.causal)
        check_even("the head dimension", head_dim)
        self.inner = inner

    @property
    def state_is_constant_size(self) -> bool:
        """That of the inner attention."""
        return self.inner.state_is_constant_size

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
        check_query_key_value(q, k, v, self.causal)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        q = rotate(q, token_positions(q, query_padding_mask))
        k = rotate(k, token_positions(k, key_padding_mask))
        return self.inner(q, k, v, key_padding_mask, query_padding_mask, dropout_p)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("padding_mask", padding_mask, q)
        if state is None:
            before = torch.zeros(q.shape[0], dtype=torch.long, device=q.device)
        else:
            before = state_entry(state, "rotary_count", 1, q)
            state = {name: tensor for name, tensor in state.items() if name != "rotary_count"}
        positions = token_positions(q, padding_mask, before)
        out, state = self.inner.extend(rotate(q, positions), rotate(k, positions), v, padding_mask, state)
        new = q.shape[2] if padding_mask is None else (~padding_mask).sum(1)
        return out, {**state, "rotary_count": before + new}

    def extra_repr(self) -> str:
        """Nothing: the inner attention is printed below."""
        return ""
