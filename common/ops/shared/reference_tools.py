"""Parts of the literal references: one query's keys, bias and weights."""

import math

import torch
from torch import Tensor


def real_tokens(padding_mask: Tensor | None, row: int, n: int) -> list[int]:
    """The indices of the real tokens of a row of ``padding_mask`` (B, n; True = padding)."""
    return [i for i in range(n) if padding_mask is None or not padding_mask[row, i]]


def bias_of(bias: Tensor | None, n: int, head: int, query: int, key: int):
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
