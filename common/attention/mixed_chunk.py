"""Mixed chunk attention on the heads of a Transformer: MC-TFM++ of FLASH's Table 5."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.rotary import check_even, cos_and_sin, document_positions, rotate_by
from ..ops.mixed_chunk import mixed_chunk_attention
from ..ops.mixed_chunk.reference import mixed_chunk_attention_reference
from ..ops.shared.checks import check_masks, check_query_key_value
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import cleared, rotated
from ..ops.shared.score_kernels import SCORE_KERNELS
from ..ops.shared.state import State, state_entry
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class MixedChunkOptions(AttentionOptions):
    """Options of mixed chunk attention; see ``common.ops.mixed_chunk_attention``."""

    chunk_size: int = count(256, "tokens C in a chunk")
    kernel: str = choice("softmax", SCORE_KERNELS, "what turns scores into weights inside a chunk")
    rotary: bool = flag(True, "rotary positions of queries and keys", setup_only=True)


@register_attention("mixed_chunk")
class MixedChunkAttention(OpAttention):
    """Softmax or relu² attention inside chunks, linear attention across them.

    ``mixed_chunk_attention`` per head, by default with softmax inside chunks (FLASH, Table 5). Attention inside a chunk
    uses the heads' q and k; the linear term uses scaled and shifted copies of them, as in the gated attention unit. All
    are rotated by position. Self-attention only; O(n C). Shapes and masks as in
    ``InnerAttention``, state as in ``mixed_chunk_attention``.

    Raises:
        ValueError: an option that is not allowed, or an odd ``head_dim`` with rotary positions.
    """

    about = About(
        "mixed chunk attention",
        "Hua et al., FLASH, ICML 2022, equations 7 and 8",
        "n (C + d) d",
        "2d (n mod C) + 2d²",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2202.10447",
    )
    Options = MixedChunkOptions
    supports = frozenset({"causal", "bidirectional", "rotary", "forget"})
    needs = frozenset({"num_heads", "head_dim"})
    op = staticmethod(mixed_chunk_attention)
    reference_op = staticmethod(mixed_chunk_attention_reference)

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        if self.options.rotary:
            check_even("head_dim", channels)
        self.gamma = nn.Parameter(torch.empty(2, heads, channels))
        self.beta = nn.Parameter(torch.empty(2, heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw gamma from N(0, 0.02), and set beta to 0."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)

    def state_tokens(self) -> int:
        """The size of a chunk."""
        return self.options.chunk_size

    def apply_op(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        log_decay: Tensor | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
        segment_ids: Tensor | None = None,
    ) -> Any:
        """Apply ``op`` to the queries and keys of both terms, rotated by position."""
        self._check_heads(q, k, v)
        check_masks(key_padding_mask, k, query_padding_mask, q)
        # Padding must not reach the gradients of the scales.
        q, k = zero_padding(zero_padding(q, query_padding_mask), key_padding_mask), zero_padding(k, key_padding_mask)
        before = None if initial_state is None else state_entry(initial_state, "count", 1, q)
        positions = document_positions(q, key_padding_mask, before, segment_ids, initial_state)
        heads = self._queries_and_keys(q, k, positions)
        arguments = {"log_decay": log_decay, "initial_state": initial_state, "return_state": return_state}
        arguments.update(self.packing(segment_ids))
        out = super().apply_op(*heads, v, key_padding_mask=key_padding_mask, **arguments)
        if return_state:
            return zero_padding(out[0], query_padding_mask), out[1]
        return zero_padding(out, query_padding_mask)

    def apply_reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """Apply ``reference_op`` to the same queries and keys, computed literally."""
        heads = [q, k, *(x * self.gamma[i, :, None] + self.beta[i, :, None] for i, x in enumerate((q, k)))]
        if self.options.rotary:
            heads = [rotated(x, key_padding_mask) for x in heads]
        out = super().apply_reference(*heads, v, key_padding_mask=key_padding_mask, log_decay=log_decay)
        return cleared(out, query_padding_mask)

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_query_key_value(q, k, v, one_length=True)
        heads, channels = self.shape.num_heads, self.shape.head_dim
        if (q.shape[1], q.shape[3]) != (heads, channels):
            raise ValueError(f"q has shape {tuple(q.shape)}; allowed: {heads} heads of {channels} channels")

    def _queries_and_keys(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """q_quad, k_quad, q_lin and k_lin, (B, H, n, d) each."""
        gamma, beta = self.gamma[:, :, None], self.beta[:, :, None]  # (2, H, 1, d)
        # Under autocast q and k are in half precision, but the scales are not.
        heads = (q, k, (q * gamma[0] + beta[0]).to(q.dtype), (k * gamma[1] + beta[1]).to(k.dtype))
        if not self.options.rotary:
            return heads
        rotation = cos_and_sin(positions, q.shape[-1], q.dtype)
        if q.shape[2] == 1:  # one call for all four
            return rotate_by(torch.stack(heads), *rotation).unbind()
        return tuple(rotate_by(x, *rotation) for x in heads)
