"""The base class of both kinds of DAFT: heads side by side in one row of channels, and queries that may be missing."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.shared.checks import check_padding_mask
from ..ops.shared.padding import zero_padding
from ..ops.shared.state import State
from ._base import InnerAttention


class DaftAttention(InnerAttention):
    """An ``InnerAttention`` around an op on (B, n, H c), *A Dot Product Attention Free Transformer*.

    Subclasses define ``forward``, ``_check(q, k, v)``, and ``_op(q, k, v, **state_and_mask)``, the causal op.
    """

    _op: Callable

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of queries, if there are any, of keys and of values."""
        own = super().projections(head_dim)
        return own if self.options.query else {"k": own["k"], "v": own["v"]}

    @torch.jit.unused
    def extend(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, d) and the state after them, which is the op's."""
        self._check_causal()
        merged = self._merged(q, k, v, "padding_mask", padding_mask)
        out, state = self._op(*merged, key_padding_mask=padding_mask, initial_state=state, return_state=True)
        return split_heads(out, v.shape[1]), state

    @torch.jit.unused
    def recorded_keys(self, k: Tensor) -> Tensor:
        """What ``record_keys`` keeps of a call: a copy of k (B, H, n, c)."""
        return k.clone()

    @torch.jit.unused
    def _merged(
        self, q: Tensor | None, k: Tensor, v: Tensor, argument: str, query_padding_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """q, k and v (B, H, n, c), checked, as (B, n, H c); ``argument`` is what the caller calls the mask."""
        if (q is not None) != self.options.query:
            given, allowed = ("None", "a tensor") if q is None else ("a tensor", "None")
            raise ValueError(f"q is {given}; allowed with query={self.options.query}: {allowed}")
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
