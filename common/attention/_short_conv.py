"""A short causal convolution of queries, keys and values before any mechanism with a decoding state of fixed size."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..modules.short_conv import ShortConv
from ..ops.shared.checks import ArgumentError, check_masks, check_padding_mask, check_positive_int
from ..ops.shared.padding import either_mask
from ..ops.shared.precision import compute_dtype
from ..ops.shared.reference_tools import either_padding
from ..ops.shared.segments import Documents, find_documents
from ..ops.shared.state import State, split_state, state_of_sums
from ._base import InnerAttention
from ._options import AttentionOptions, count
from ._wrapper import WrappingAttention

#: The tensors that are convolved.
_NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class ShortConvOptions(AttentionOptions):
    """Option of ``build_attention`` for every causal mechanism whose decoding state has a constant size."""

    short_conv: int | None = count(
        None,
        "taps of a causal convolution of queries, keys and values over the last tokens, channel by channel; in none of "
        "the papers; today's linear-attention layers have 4; 0 for none",
        optional=True,
    )


def takes_short_conv(attention: type[InnerAttention] | InnerAttention) -> bool:
    """Whether a causal mechanism can have a short convolution: its decoding state must have a constant size."""
    return "causal" in attention.supports and bool(attention.linear_cost)


class ShortConvAttention(WrappingAttention):
    """Convolves each channel of q, k and v over the last ``taps`` real tokens before calling ``inner``.

    Sums over all tokens lose which tokens were neighbours. The convolution restores the local order, in O(n taps d)
    and with a state of constant size. It is our addition and in none of the papers; layers of flash-linear-attention
    have it too, followed by silu. No activation follows here, since each mechanism has its own feature map: with silu,
    Flow-Attention learned to name the previous token in 50 % of cases, without silu in 94 % (16 symbols, 300 updates,
    one seed, 2026-11-22).

    If ``inner`` has no q or k, it is not convolved. Other inputs of ``inner``, such as the tokens x, are passed
    unchanged. Shapes and masks as in ``InnerAttention``. Queries and keys are the same tokens, so queries are convolved
    over tokens that neither mask marks as padding. The state is that of ``inner`` with ``short_conv_q``,
    ``short_conv_k`` and ``short_conv_v``, (B, H, taps - 1, c) each.

    Raises:
        ValueError: ``inner`` is not causal or its decoding state grows; ``taps``, ``num_heads`` or ``head_dim`` is no
            integer of at least 1.
    """

    def __init__(self, inner: InnerAttention, taps: int, num_heads: int, head_dim: int) -> None:
        if not (inner.causal and takes_short_conv(inner)):
            why = ", whose decoding state grows" if inner.causal else " with causal=False"
            raise ArgumentError(f"`short_conv` is {taps!r}; allowed for attention {inner.name!r}{why}: None")
        for name, value in {"short_conv": taps, "num_heads": num_heads, "head_dim": head_dim}.items():
            check_positive_int(name, value)
        super().__init__(inner)
        self.taps = taps
        channels = inner.projections(head_dim)
        for name in _NAMES:
            setattr(self, f"{name}_conv", ShortConv(num_heads, channels[name], taps) if name in channels else None)

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **inputs: Any,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        self._check(q, k, v)
        check_masks(key_padding_mask, v, query_padding_mask, v)
        masks = (either_mask(query_padding_mask, key_padding_mask), key_padding_mask, key_padding_mask)
        segment_ids = inputs.get("segment_ids")
        documents = [None if segment_ids is None else find_documents(segment_ids, mask, None, v) for mask in masks]
        calls = zip(self._convs(), (q, k, v), masks, documents)
        convolved = (x if conv is None else self._convolved(conv, x, mask, docs) for conv, x, mask, docs in calls)
        return self.inner(*convolved, key_padding_mask, query_padding_mask, dropout_p, **inputs)

    def _convolved(
        self, conv: ShortConv, x: Tensor, padding_mask: Tensor | None, documents: Documents | None
    ) -> Tensor:
        """Apply ``conv`` to x (B, H, n, c), a whole sequence or this process's part of one."""
        if self.context is None:
            return conv(x, padding_mask, None, documents)[0]

        def after(tensors: tuple[Tensor], mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
            y, last = conv(*tensors, mask, None if state is None else state["last"])
            return y, {"last": last}

        return self.context.carry(conv, after, (x,), padding_mask)

    def extend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; the convolution costs O(taps) per token."""
        self._check(q, k, v)
        check_padding_mask("padding_mask", padding_mask, v)
        convs = dict(zip(_NAMES, self._convs()))
        shapes = {_entry(name): conv.state_shape(v.shape[0]) for name, conv in convs.items() if conv is not None}
        before, inner_state = split_state(state, shapes)
        before = state_of_sums(before, shapes, compute_dtype(v), v) or {}
        segment_ids = inputs.get("segment_ids")
        documents = None if segment_ids is None else find_documents(segment_ids, padding_mask, inner_state, v)
        convolved, after = {"q": q, "k": k, "v": v}, {}
        for name, conv in convs.items():
            if conv is not None:
                entry = _entry(name)
                convolved[name], after[entry] = conv(convolved[name], padding_mask, before.get(entry), documents)
        out, inner_state = self.inner.extend(**convolved, padding_mask=padding_mask, state=inner_state, **inputs)
        return out, {**inner_state, **after}

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """The inner attention's literal formula after literal convolutions; shapes and masks as in ``forward``."""
        masks = (either_padding(query_padding_mask, key_padding_mask), key_padding_mask, key_padding_mask)
        convolved = (
            x if conv is None else conv.reference(x, mask) for conv, x, mask in zip(self._convs(), (q, k, v), masks)
        )
        return self.inner.reference(*convolved, key_padding_mask, query_padding_mask, **inputs)

    def _convs(self) -> tuple[ShortConv | None, ...]:
        """Convolutions of q, k and v; None for a tensor that ``inner`` does not have."""
        return self.q_conv, self.k_conv, self.v_conv

    def _check(self, q: Tensor | None, k: Tensor | None, v: Tensor) -> None:
        """Raise ValueError unless each convolved tensor fits its convolution and the tensors before it."""
        first = None
        for name, x, conv in zip(_NAMES, (q, k, v), self._convs()):
            if conv is None:  # the inner attention checks this tensor
                continue
            heads, channels, _ = conv.weight.shape
            if not isinstance(x, Tensor):
                raise ValueError(f"{name} is a {type(x).__name__}; allowed: a tensor")
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != (heads, channels) or x.shape[2] == 0:
                allowed = f"(B, {heads}, tokens, {channels}), at least one token"
                raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {allowed}")
            if not x.is_floating_point() or x.device != conv.weight.device:
                allowed = f"floating point, on {conv.weight.device} as the weights are"
                raise ValueError(f"{name} is {x.dtype} on {x.device}; allowed: {allowed}")
            first = x if first is None else first
            if x.shape[:3] != first.shape[:3]:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {tuple(first.shape[:3])} and channels")

    def extra_repr(self) -> str:
        """The option; the inner attention is printed below."""
        return f"short_conv={self.taps}"


def _entry(name: str) -> str:
    """The name of the state's entry for q, k or v."""
    return f"short_conv_{name}"
