"""The attention of the gated attention unit, literally: every weight of every query written out."""

import math
from typing import List, Optional

import torch
from torch import Tensor


def gau_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Optional[Tensor] = None,
    causal: bool = False,
    divisor: Optional[float] = None,
    key_padding_mask: Optional[Tensor] = None,
    kernel: str = "relu2",
    first_softmax: bool = False,
) -> Tensor:
    """FLASH, section 3.2, one query of one head at a time; arguments as in ``gau_attention``, with or without heads.

    O(n² (s + e)) in Python steps: for comparison only.
    """
    if q.dim() == 3:
        options = dict(bias=bias, causal=causal, divisor=divisor, key_padding_mask=key_padding_mask, kernel=kernel)
        heads = (x.unsqueeze(1) for x in (q, k, v))
        return gau_attention_reference(*heads, first_softmax=first_softmax, **options).squeeze(1)
    batch, heads, n, s = q.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        real = real_tokens(key_padding_mask, b, n)
        for h in range(heads):
            for position, i in enumerate(real):
                name = "softmax" if first_softmax and position == 0 else kernel
                visible = position + 1 if causal else len(real)
                by = math.sqrt(s) if name == "softmax" else visible
                by = by if divisor is None or (first_softmax and position == 0) else divisor
                scores = torch.stack([
                    (q[b, h, i] * k[b, h, real[other]]).sum() / by + bias_of(bias, n, h, position, other)
                    for other in range(visible)
                ])  # fmt: skip
                weights = weights_of(scores, name)  # (visible,)
                total = sum(weights[other] * v[b, h, real[other]] for other in range(visible))  # (e,)
                out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(i)), total)
    return out


def real_tokens(padding_mask: Optional[Tensor], row: int, n: int) -> List[int]:
    """The indices of the real tokens of a row of ``padding_mask`` (B, n; True = padding)."""
    return [i for i in range(n) if padding_mask is None or not padding_mask[row, i]]


def bias_of(bias: Optional[Tensor], n: int, head: int, query: int, key: int):
    """One entry of a bias for n tokens, a matrix or a vector over distances, of one head or of all."""
    if bias is None:
        return 0.0
    if bias.dim() == 3 or (bias.dim() == 2 and tuple(bias.shape) != (n, n)):
        bias = bias[head]
    return bias[query, key] if bias.dim() == 2 else bias[query - key + n - 1]


def weights_of(scores: Tensor, kernel: str) -> Tensor:
    """The weights (m,) of one query's scores (m,)."""
    if kernel == "softmax":
        return torch.exp(scores - scores.max()) / torch.exp(scores - scores.max()).sum()
    if kernel == "laplace":
        mean, deviation = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
        return 0.5 * (1 + torch.erf((scores - mean) / (deviation * math.sqrt(2))))
    return torch.clamp(scores, min=0) ** 2
