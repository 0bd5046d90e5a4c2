"""An external mechanism that wrongly reads padding and the future: the mean of all values."""

import torch
from torch import Tensor

from common.attention import InnerAttention, register_attention


@register_attention("broken_stranger")
class BrokenAttention(InnerAttention):
    """The mean of all values; masks are ignored."""

    supports = frozenset({"causal"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None, dropout_p: float = 0.0, **more) -> Tensor:
        """q, k, v (B, H, n, d) -> (B, H, n, d)."""
        return v.mean(2, keepdim=True) + torch.zeros_like(v)

    reference = forward
