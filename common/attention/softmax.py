"""Softmax attention as a module: torch's fused kernel, the peer everything is compared with."""

from typing import Final, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.checks import State, check_padding_mask, check_query_key_value
from ..ops.chunks import zero_padding
from ..ops.history import extend_history
from .base import InnerAttention


class SoftmaxAttention(InnerAttention):
    """``scaled_dot_product_attention`` with scale 1/sqrt(d), O(n m d) time; shapes and masks as in ``InnerAttention``.

    A padding mask in a causal module costs O(n m) memory for the combined mask. ``extend`` keeps every key and value
    it has seen: its state grows. Raises ValueError for shapes or masks that do not fit.
    """

    causal: Final[bool]
    state_is_constant_size = False

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
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the keys, values and padding of all tokens so far."""
        self._check_causal()
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("padding_mask", padding_mask, q)
        q, k, v = (zero_padding(x, padding_mask) for x in (q, k, v))
        seen = extend_history({"k": k, "v": v}, padding_mask, state)
        out = _masked(q, seen["k"], seen["v"], seen["padding_mask"], True, 0.0)
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
