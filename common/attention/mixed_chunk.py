"""Mixed chunk attention on the heads of a Transformer: MC-TFM++ of FLASH's Table 5."""

from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from ..ops.checks import (
    State,
    check_choice,
    check_padding_mask,
    check_positive_int,
    check_query_key_value,
    state_entry,
)
from ..ops.chunks import zero_padding
from ..ops.mixed_chunk_attention import mixed_chunk_attention
from ..ops.score_kernels import SCORE_KERNELS
from ..positions import check_even, rotate, token_positions
from .base import InnerAttention, drop_sources


class MixedChunkAttention(InnerAttention):
    """``mixed_chunk_attention`` per head: softmax inside chunks of C tokens, linear across them (FLASH, Table 5).

    The heads' own q and k serve inside a chunk; those of the linear term are scaled and shifted copies, as in the gated
    attention unit, and all are rotated by position. Self-attention only; O(n C). H = ``num_heads``, d = ``head_dim``:
    q and k (B, H, n, d). Shapes and masks as in ``InnerAttention``, state as in ``mixed_chunk_attention``.

    Raises:
        ValueError: a count below 1, an unknown kernel, or an odd ``head_dim`` with rotary positions.
    """

    def __init__(
        self,
        causal: bool = False,
        *,
        num_heads: int,
        head_dim: int,
        chunk_size: int = 256,
        kernel: str = "softmax",
        rotary: bool = True,
    ) -> None:
        super().__init__(causal)
        for name, given in (("num_heads", num_heads), ("head_dim", head_dim), ("chunk_size", chunk_size)):
            check_positive_int(name, given)
        check_choice("kernel", kernel, SCORE_KERNELS)
        if rotary:
            check_even("head_dim", head_dim)
        self.num_heads, self.head_dim, self.chunk_size = num_heads, head_dim, chunk_size
        self.kernel, self.rotary = kernel, rotary
        self.gamma = nn.Parameter(torch.empty(2, num_heads, head_dim))
        self.beta = nn.Parameter(torch.zeros(2, num_heads, head_dim))
        nn.init.normal_(self.gamma, std=0.02)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        self._check_heads(q, k, v)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        # What stands in padding must not reach the gradients of the scales.
        q, k = zero_padding(q, key_padding_mask), zero_padding(k, key_padding_mask)
        heads = self._queries_and_keys(q, k, token_positions(q, key_padding_mask))
        out = mixed_chunk_attention(
            *heads, drop_sources(v, dropout_p), key_padding_mask=key_padding_mask, causal=self.causal, **self._options()
        )
        return zero_padding(out, query_padding_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(C) per token."""
        self._check_causal()
        self._check_heads(q, k, v)
        check_padding_mask("padding_mask", padding_mask, q)
        count = None if state is None else state_entry(state, "count", 1, q)
        q, k = zero_padding(q, padding_mask), zero_padding(k, padding_mask)
        heads = self._queries_and_keys(q, k, token_positions(q, padding_mask, count))
        return mixed_chunk_attention(
            *heads, v, key_padding_mask=padding_mask, causal=True, initial_state=state, return_state=True,
            **self._options(),
        )  # fmt: skip

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_query_key_value(q, k, v, one_length=True)
        if (q.shape[1], q.shape[3]) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; allowed: {self.num_heads} heads of {self.head_dim} channels"
            )

    def _options(self) -> dict:
        return {"chunk_size": self.chunk_size, "kernel": self.kernel}

    def _queries_and_keys(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, ...]:
        """q_quad, k_quad, q_lin and k_lin, (B, H, n, d) each."""
        gamma, beta = self.gamma[:, :, None], self.beta[:, :, None]  # (2, H, 1, d)
        # Under autocast q and k are of half precision, the scales are not.
        heads = (q, k, (q * gamma[0] + beta[0]).to(q.dtype), (k * gamma[1] + beta[1]).to(k.dtype))
        return tuple(rotate(x, positions) for x in heads) if self.rotary else heads
