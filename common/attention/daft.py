"""What both kinds of DAFT share: heads side by side in one row of channels, and queries that may be missing."""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..ops.checks import State, check_padding_mask
from ..ops.chunks import zero_padding
from .base import InnerAttention


class DaftAttention(InnerAttention):
    """An ``InnerAttention`` around an op on (B, n, H c), *A Dot Product Attention Free Transformer*.

    Subclasses define ``forward``, ``_check(q, k, v)``, and ``_op(q, k, v, **state_and_mask)``, the causal op.
    """

    _op: Callable

    @torch.jit.unused
    def extend(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        padding_mask: Optional[Tensor] = None,
        state: Optional[State] = None,
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, d) and the state after them, which is the op's."""
        self._check_causal()
        heads = v.shape[1]
        q, k, v = self._merged(q, k, v, "padding_mask", padding_mask)
        out, state = self._op(q, k, v, key_padding_mask=padding_mask, initial_state=state, return_state=True)
        return split_heads(out, heads), state

    @torch.jit.unused
    def _merged(
        self, q: Optional[Tensor], k: Tensor, v: Tensor, argument: str, query_padding_mask: Optional[Tensor]
    ) -> Tuple[Optional[Tensor], Tensor, Tensor]:
        """q, k and v (B, H, n, c), checked, as (B, n, H c); ``argument`` is what the caller calls the mask."""
        if (q is not None) != self.query:
            given, allowed = ("None", "a tensor") if q is None else ("a tensor", "None")
            raise ValueError(f"q is {given}; allowed with query={self.query}: {allowed}")
        self._check(q, k, v)
        check_padding_mask(argument, query_padding_mask, v)
        # An output of 0 is not enough: what is not finite in a padded query would still be in its gradient.
        query = None if q is None else merge_heads(zero_padding(q, query_padding_mask))
        return query, merge_heads(k), merge_heads(v)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, n, c) -> (B, n, H c)."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, H c) -> (B, H, n, c)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
