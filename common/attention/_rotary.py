"""Rotary positions around any inner attention."""

from typing import Any

import torch
from torch import Tensor

from ..modules.rotary import check_even, document_positions, rotate
from ..ops.shared.checks import check_both_masks, check_masks, check_padding_mask, check_query_key_value
from ..ops.shared.reference_tools import rotated
from ..ops.shared.segments import find_documents
from ..ops.shared.state import State, state_entry
from ._base import InnerAttention
from ._build import build_attention
from ._registry import ATTENTIONS
from ._short_conv import ShortConvAttention
from ._wrapper import WrappingAttention


class RotaryAttention(WrappingAttention):
    """Rotates queries and keys by their position among the real tokens (RoFormer) before calling ``inner``.

    Shapes and masks as in ``InnerAttention``; the state is that of ``inner`` and ``rotary_count`` (B,), the real
    tokens so far. If queries and keys are the same tokens, because ``inner`` is causal or only for self-attention, both
    are counted by ``key_padding_mask``. Otherwise queries are counted by their own mask, and both masks or neither must
    be given.

    Raises:
        ValueError: an odd head dimension; an ``inner`` that is only for images, whose tokens are in no single order;
            one without queries or keys, or with queries and keys of different widths; one with a short convolution,
            which would mix rotated tokens and belongs around this module.
    """

    def __init__(self, inner: InnerAttention, head_dim: int) -> None:
        check_even("head_dim", head_dim)
        if isinstance(inner, ShortConvAttention):
            raise ValueError("inner has short_conv; allowed: ShortConvAttention around RotaryAttention")
        if "spatial_shape" in type(inner).needs:
            raise ValueError(f"inner is attention {inner.name!r}, of images alone; allowed: attention of sequences")
        _check_widths(inner, head_dim)
        super().__init__(inner, f"{inner.name} with rotary positions")

    def stored_options(self) -> dict[str, Any]:
        """Record that there are rotary positions; the inner attention records its own options."""
        return {"attention": self.name}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **inputs: Any,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``."""
        one_sequence, segment_ids = self.causal or "cross" not in self.supports, inputs.get("segment_ids")
        check_query_key_value(q, k, v, one_sequence)
        check_masks(key_padding_mask, k, query_padding_mask, q)
        if not one_sequence:
            check_both_masks(key_padding_mask, query_padding_mask)
        before = None if self.context is None else self.context.before
        query_mask = key_padding_mask if one_sequence else query_padding_mask
        q = rotate(q, document_positions(q, query_mask, before, segment_ids, None))
        k = rotate(k, document_positions(k, key_padding_mask, before, segment_ids, None))
        return self.inner(q, k, v, key_padding_mask, query_padding_mask, dropout_p, **inputs)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("padding_mask", padding_mask, q)
        segment_ids = inputs.get("segment_ids")
        if state is None:
            before = torch.zeros(q.shape[0], dtype=torch.long, device=q.device)
        else:
            before = state_entry(state, "rotary_count", 1, q)
            state = {name: tensor for name, tensor in state.items() if name != "rotary_count"}
        positions = document_positions(q, padding_mask, before, segment_ids, state)
        if segment_ids is None:
            count = before + (q.shape[2] if padding_mask is None else (~padding_mask).sum(1))
        else:
            count = find_documents(segment_ids, padding_mask, state, q).counts(before)
        q, k = rotate(q, positions), rotate(k, positions)
        out, state = self.inner.extend(q, k, v, padding_mask, state, **inputs)
        return out, {**state, "rotary_count": count}

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """The inner attention's literal formula on rotated queries and keys; shapes and masks as in ``forward``."""
        one_sequence = self.causal or "cross" not in self.supports
        q = rotated(q, key_padding_mask if one_sequence else query_padding_mask)
        k = rotated(k, key_padding_mask)
        return self.inner.reference(q, k, v, key_padding_mask, query_padding_mask, **inputs)

    def extra_repr(self) -> str:
        """Nothing: the inner attention is printed below."""
        return ""


def build_rotary_attention(
    name: str, causal: bool, rotary: bool, /, *, head_dim: int, **options: Any
) -> InnerAttention:
    """``build_attention(name, causal, ...)``, with rotary positions if ``rotary``.

    A mechanism with an option ``rotary`` of its own gets that value for it; any other is wrapped in
    ``RotaryAttention``.
    """
    if name in ATTENTIONS and "rotary" in ATTENTIONS[name].supports:
        return build_attention(name, causal, head_dim=head_dim, **{**options, "rotary": rotary})
    inner = build_attention(name, causal, head_dim=head_dim, **options)
    return RotaryAttention(inner, head_dim) if rotary else inner


def _check_widths(inner: InnerAttention, head_dim: int) -> None:
    """Raise ValueError unless queries and keys of ``inner`` have the same, even number of channels."""
    widths = [inner.projections(head_dim).get(name) for name in ("q", "k")]
    if None in widths or widths[0] != widths[1] or widths[0] % 2:
        q, k = ("no" if width is None else width for width in widths)
        raise ValueError(
            f"inner is attention {inner.name!r}, with {q} channels of a query and {k} of a key for a head_dim of "
            f"{head_dim}; allowed with rotary positions: as many for both, an even number"
        )
