"""Parts of the literal references: one query's keys, bias and weights."""

import math
from collections.abc import Callable

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


def softmax_where(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    sees: Callable[[int, int, int], bool],
) -> Tensor:
    """Self-attention where the token at position i sees that at position j if ``sees(i, j, count)``, one at a time.

    Positions are those among the ``count`` real tokens of a row. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); a
    token that is padding, as a key or as a query, gives 0. O(n²) whatever is seen.
    """
    out = []
    for b in range(q.shape[0]):
        real = real_tokens(key_padding_mask, b, q.shape[2])
        queries = set(real_tokens(query_padding_mask, b, q.shape[2]))
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        for i, token in enumerate(real):
            if token not in queries:
                continue
            keys = [real[j] for j in range(len(real)) if sees(i, j, len(real))]
            scores = (q[b, :, token, None] * k[b, :, keys]).sum(-1) / math.sqrt(q.shape[3])  # (H, keys)
            rows[token] = (scores.softmax(-1).unsqueeze(-1) * v[b, :, keys]).sum(1)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)
