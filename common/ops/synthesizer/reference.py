"""Synthesizer, literally: the logits of one token over positions, their softmax, and the sum of values."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens, weights_of


def synthesizer_attention_reference(
    features: Tensor,
    v: Tensor,
    columns: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Tay et al. 2021, section 3, one token at a time; shapes as in ``synthesizer_attention``.

    For comparison only.
    """
    out = []
    for b in range(v.shape[0]):
        keys = real_tokens(key_padding_mask, b, v.shape[2])
        queries = real_tokens(query_padding_mask, b, v.shape[2])
        for h in range(v.shape[1]):
            rows = [torch.zeros_like(v[b, h, 0]) for _ in range(v.shape[2])]
            for i in queries:
                position = sum(j < i for j in keys)
                own = features[h, position] if features.dim() == 3 else features[b, h, i]
                own = own if features.dim() == 3 else torch.where(own > 0, own, 0)
                logits = own if columns is None else columns[h].to(own.dtype) @ own
                logits = logits if bias is None else logits + bias[h].to(own.dtype)
                seen = [j for j in keys if not causal or j <= i]
                if seen:
                    rows[i] = weights_of(logits[: len(seen)], "softmax").to(v.dtype) @ v[b, h, seen]
            out.append(torch.stack(rows))
    return torch.stack(out).unflatten(0, v.shape[:2])  # (B, H, n, e)
