"""Retention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..modules.rotary import check_even, cos_and_sin, document_positions, rotate_by
from ..ops.retention import DECAYS, retention_attention
from ..ops.retention.reference import retention_attention_reference
from ..ops.shared.checks import check_padding_mask, check_query_key_value
from ..ops.shared.reference_tools import rotated
from ..ops.shared.state import State, state_entry
from ._options import About, AttentionOptions, causal_chunk_size, choice, default_of, flag
from ._output_gate import OutputGateAttention, output_gate, output_norm
from ._registry import register_attention


@dataclass(frozen=True)
class RetentionOptions(AttentionOptions):
    """Options of retention; see ``common.ops.retention_attention``."""

    decays: str = choice(
        default_of(retention_attention, "decays"),
        DECAYS,
        "what a head h forgets in each token: powers, 2^(-5-h); log_space, from 1/32 to 1/512 for any number of heads",
    )
    score_norm: bool = flag(
        default_of(retention_attention, "score_norm"),
        "scores are divided by their sum, and decays by the root of theirs; an output norm leaves none of it",
    )
    rotary: bool = flag(True, "rotary positions of queries and keys", setup_only=True)
    output_norm: str = output_norm("group")
    output_gate: str = output_gate("swish")
    chunk_size: int = causal_chunk_size(retention_attention)


@register_attention("retention")
class RetentionAttention(OutputGateAttention):
    """A sum of rotated keys and values that each head forgets at a fixed pace; only causal.

    Each head's output goes through its own norm ("group"; the released code has "rms" without weights) and a swish gate
    of the token x before its projection, x (B, n, D). In the paper values are twice as wide as keys; here both have the
    same width. O(n (C + d) d). Other shapes and masks as in ``InnerAttention``, options as in
    ``common.ops.retention_attention`` and ``OutputGateAttention``.

    Raises:
        ValueError: an option that is not allowed, or an odd ``head_dim`` with rotary positions.
    """

    about = About(
        "retention",
        "Sun et al., Retentive Network, 2023",
        "n (C + d) d",
        "d² + d",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2307.08621",
    )
    Options = RetentionOptions
    supports = frozenset({"causal", "rotary"})
    op = staticmethod(retention_attention)
    reference_op = staticmethod(retention_attention_reference)
    op_takes_x = False

    def setup(self) -> None:
        if self.options.rotary:
            check_even("head_dim", self.shape.head_dim)
        self.build_output()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.reset_output()

    def operate(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None, **arguments: Any
    ) -> Tensor | tuple[Tensor, State]:
        """Apply ``op`` to queries and keys, rotated by position among the real tokens."""
        if self.options.rotary:
            check_query_key_value(q, k, v, one_length=True)
            check_padding_mask("key_padding_mask", key_padding_mask, k)
            state, segment_ids = arguments.get("initial_state"), arguments.get("segment_ids")
            before = state_entry(state, "count", 1, q) if state else None
            positions = document_positions(k, key_padding_mask, before, segment_ids, state)
            q, k = _rotated(q, k, positions)
        return super().operate(q, k, v, key_padding_mask=key_padding_mask, **arguments)

    def operate_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """Apply ``op.step`` to the rotated query and key of one token."""
        if self.options.rotary:
            q, k = _rotated(q, k, state["count"][:, None, None])
        return super().operate_step(q, k, v, state)

    def operate_literally(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None, **arguments: Any
    ) -> Tensor:
        """Apply ``reference_op`` to queries and keys, rotated by position among the real tokens."""
        if self.options.rotary:
            q, k = rotated(q, key_padding_mask), rotated(k, key_padding_mask)
        return super().operate_literally(q, k, v, key_padding_mask=key_padding_mask, **arguments)


def _rotated(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotation = cos_and_sin(positions, q.shape[-1], q.dtype)
    if q.shape[2] == 1:  # one call for both
        return rotate_by(torch.stack((q, k)), *rotation).unbind()
    return rotate_by(q, *rotation), rotate_by(k, *rotation)
