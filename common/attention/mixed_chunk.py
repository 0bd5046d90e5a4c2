"""Mixed chunk attention on the heads of a Transformer: MC-TFM++ of FLASH's Table 5."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..modules.rotary import check_even, rotate, token_positions
from ..ops.mixed_chunk import attend, mixed_chunk_options
from ..ops.mixed_chunk.reference import mixed_chunk_attention_reference
from ..ops.shared.checks import check_padding_mask, check_query_key_value
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import cleared, rotated
from ..ops.shared.score_kernels import SCORE_KERNELS
from ..ops.shared.state import State, state_entry
from ._base import InnerAttention, drop_sources
from ._options import AttentionOptions, choice, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class MixedChunkOptions(AttentionOptions):
    """Options of mixed chunk attention; see ``common.ops.mixed_chunk_attention``."""

    chunk_size: int = count(256, "tokens C in a chunk")
    kernel: str = choice("softmax", SCORE_KERNELS, "what turns scores into weights inside a chunk")
    rotary: bool = flag(True, "rotary positions of queries and keys")


@register_attention("mixed_chunk")
class MixedChunkAttention(InnerAttention):
    """``mixed_chunk_attention`` per head: softmax inside chunks of C tokens, linear across them (FLASH, Table 5).

    The heads' own q and k serve inside a chunk; those of the linear term are scaled and shifted copies, as in the gated
    attention unit, and all are rotated by position. Self-attention only; O(n C).
    Shapes and masks as in ``InnerAttention``, state as in ``mixed_chunk_attention``.

    Raises:
        ValueError: an option that is not allowed, or an odd ``head_dim`` with rotary positions.
    """

    Options = MixedChunkOptions
    supports = frozenset({"causal", "bidirectional", "rotary"})
    needs = frozenset({"num_heads", "head_dim"})

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        if self.options.rotary:
            check_even("head_dim", channels)
        self._op_options = mixed_chunk_options(self.options.chunk_size, self.causal, self.options.kernel)
        self.gamma = nn.Parameter(torch.empty(2, heads, channels))
        self.beta = nn.Parameter(torch.zeros(2, heads, channels))
        nn.init.normal_(self.gamma, std=0.02)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        self._check_heads(q, k, v)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        # What stands in padding must not reach the gradients of the scales.
        q, k = zero_padding(zero_padding(q, query_padding_mask), key_padding_mask), zero_padding(k, key_padding_mask)
        heads = self._queries_and_keys(q, k, token_positions(q, key_padding_mask))
        out = attend(*heads, drop_sources(v, dropout_p), self._op_options, key_padding_mask=key_padding_mask)
        return zero_padding(out, query_padding_mask)

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        heads = [q, k, *(x * self.gamma[i, :, None] + self.beta[i, :, None] for i, x in enumerate((q, k)))]
        if self.options.rotary:
            heads = [rotated(x, key_padding_mask) for x in heads]
        options = {"chunk_size": self.options.chunk_size, "causal": self.causal, "kernel": self.options.kernel}
        out = mixed_chunk_attention_reference(*heads, v, key_padding_mask=key_padding_mask, **options)
        return cleared(out, query_padding_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(C) per token."""
        self._check_next_tokens(q, k, v, padding_mask)
        self._check_heads(q, k, v)
        count = None if state is None else state_entry(state, "count", 1, q)
        q, k = zero_padding(q, padding_mask), zero_padding(k, padding_mask)
        heads = self._queries_and_keys(q, k, token_positions(q, padding_mask, count))
        continued = {"initial_state": state, "return_state": True}
        return attend(*heads, v, self._op_options, key_padding_mask=padding_mask, **continued)

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_query_key_value(q, k, v, one_length=True)
        heads, channels = self.shape.num_heads, self.shape.head_dim
        if (q.shape[1], q.shape[3]) != (heads, channels):
            raise ValueError(f"q has shape {tuple(q.shape)}; allowed: {heads} heads of {channels} channels")

    def _queries_and_keys(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """q_quad, k_quad, q_lin and k_lin, (B, H, n, d) each."""
        gamma, beta = self.gamma[:, :, None], self.beta[:, :, None]  # (2, H, 1, d)
        # Under autocast q and k are of half precision, the scales are not.
        heads = (q, k, (q * gamma[0] + beta[0]).to(q.dtype), (k * gamma[1] + beta[1]).to(k.dtype))
        return tuple(rotate(x, positions) for x in heads) if self.options.rotary else heads
