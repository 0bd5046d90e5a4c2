"""The attention of the gated attention unit, literally: every weight of every query written out."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import bias_of, real_tokens, weights_of


def gau_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    divisor: float | None = None,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    kernel: str = "relu2",
    first_softmax: bool = False,
) -> Tensor:
    """FLASH, section 2, one query of one head at a time; arguments as in ``gau_attention``, with or without heads.

    O(n² (s + e)) in Python steps: for comparison only.
    """
    if q.dim() == 3:
        options = dict(bias=bias, causal=causal, divisor=divisor, kernel=kernel, first_softmax=first_softmax)
        masks = dict(key_padding_mask=key_padding_mask, query_padding_mask=query_padding_mask)
        return gau_attention_reference(*(x.unsqueeze(1) for x in (q, k, v)), **masks, **options).squeeze(1)
    batch, heads, n, s = q.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        real, queries = real_tokens(key_padding_mask, b, n), real_tokens(query_padding_mask, b, n)
        for h in range(heads):
            for position, i in enumerate(real):
                if i not in queries:
                    continue
                name = "softmax" if first_softmax and position == 0 else kernel
                visible = position + 1 if causal else len(real)
                by = math.sqrt(s) if name == "softmax" else visible
                by = by if divisor is None or (first_softmax and position == 0) else divisor
                scores = torch.stack(
                    [
                        (q[b, h, i] * k[b, h, real[other]]).sum() / by + bias_of(bias, n, h, position, other)
                        for other in range(visible)
                    ]
                )
                weights = weights_of(scores, name)  # (visible,)
                total = sum(weights[other] * v[b, h, real[other]] for other in range(visible))  # (e,)
                out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(i)), total)
    return out
