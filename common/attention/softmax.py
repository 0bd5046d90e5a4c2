"""Softmax attention as a module: torch's fused kernel, the peer everything is compared with."""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.shared.checks import check_padding_mask, check_query_key_value
from ..ops.shared.kv_cache import extend_kv_cache
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import real_tokens
from ..ops.shared.state import State
from ._base import InnerAttention
from ._registry import register_attention


@register_attention("softmax")
class SoftmaxAttention(InnerAttention):
    """``scaled_dot_product_attention`` with scale 1/sqrt(d), O(n m d) time; shapes and masks as in ``InnerAttention``.

    A padding mask in a causal module costs O(n m) memory for the combined mask. ``extend`` keeps every key and value
    it has seen: its state grows. torch's fused kernel has no gradients of second order on a CPU; there are some inside
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. Raises ValueError for shapes or masks that do not fit.
    """

    supports = frozenset({"causal", "bidirectional", "cross", "images"})
    state_is_constant_size = False
    causal: Final[bool]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``."""
        if not torch.jit.is_scripting():
            check_query_key_value(q, k, v, self.causal)
            check_padding_mask("key_padding_mask", key_padding_mask, k)
            check_padding_mask("query_padding_mask", query_padding_mask, q)
        # A NaN in padding would pass through any mask: 0 * NaN is NaN.
        q = zero_padding(q, query_padding_mask)
        k = zero_padding(k, key_padding_mask)
        v = zero_padding(v, key_padding_mask)
        if key_padding_mask is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=self.causal)
        else:
            out = _masked(q, k, v, key_padding_mask, self.causal, dropout_p)
        return zero_padding(out, query_padding_mask)

    @torch.jit.unused
    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """softmax(q kᵀ / sqrt(d)) v, one query at a time; shapes and masks as in ``forward``."""
        out = []
        for b in range(q.shape[0]):
            keys = real_tokens(key_padding_mask, b, k.shape[2])
            rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
            for i in real_tokens(query_padding_mask, b, q.shape[2]):
                seen = [j for j in keys if not self.causal or j <= i]
                if seen:
                    scores = (q[b, :, i, None] * k[b, :, seen]).sum(-1) / q.shape[3] ** 0.5  # (H, seen)
                    rows[i] = (scores.softmax(-1).unsqueeze(-1) * v[b, :, seen]).sum(1)
            out.append(torch.stack(rows, dim=1))  # (H, n, e)
        return torch.stack(out)

    @torch.jit.unused
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the keys, values and padding of all tokens so far."""
        self._check_next_tokens(q, k, v, padding_mask)
        q, k, v = (zero_padding(x, padding_mask) for x in (q, k, v))
        seen = extend_kv_cache({"k": k, "v": v}, padding_mask, state)
        # What was seen in another dtype, under autocast or before it, is read in that of q.
        k, v = seen["k"].to(q.dtype), seen["v"].to(q.dtype)
        out = _masked(q, k, v, seen["padding_mask"], True, 0.0)
        return zero_padding(out, padding_mask), seen


def _masked(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor, causal: bool, dropout_p: float) -> Tensor:
    """Attention to real keys only; the n queries are the last n of the m tokens when causal. No real key gives 0."""
    n, m = q.shape[2], k.shape[2]
    visible = ~key_padding_mask[:, None, None, :]  # (B, 1, 1, m)
    if causal:
        visible = visible & torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)  # (B, 1, n, m)
    blind = ~visible.any(-1, keepdim=True)
    # A row without a visible key would be NaN, in the backward pass too: let it see everything, then drop it.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, dropout_p=dropout_p)
    return out.masked_fill(blind, 0.0)
