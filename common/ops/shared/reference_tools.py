"""Parts of the literal references: one query's keys, bias and weights, features, positions, layout.

Nothing here is shared with the code that it checks: this file imports only torch, and only references import it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def real_tokens(padding_mask: Tensor | None, row: int, n: int) -> list[int]:
    """The indices of the real tokens of a row of ``padding_mask`` (B, n; True = padding)."""
    return [i for i in range(n) if padding_mask is None or not padding_mask[row, i]]


def either_padding(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Padding by either of two masks (B, n), True = padding; None if both are None."""
    if mask is None or other is None:
        return other if mask is None else mask
    rows = [[bool(a) or bool(b) for a, b in zip(first, second)] for first, second in zip(mask, other)]
    return torch.tensor(rows, dtype=torch.bool, device=mask.device)


def cleared(out: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``out`` (B, H, n, e) with zeros at padding (B, n; True = padding)."""
    rows = []
    for b in range(out.shape[0]):
        real = real_tokens(padding_mask, b, out.shape[2])
        tokens = [out[b, :, i] if i in real else torch.zeros_like(out[b, :, i]) for i in range(out.shape[2])]
        rows.append(torch.stack(tokens, dim=1))
    return torch.stack(rows)


def side_by_side(x: Tensor) -> Tensor:
    """The channels of all heads in one row: (B, H, n, c) -> (B, n, H c)."""
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


def by_head(x: Tensor, heads: int) -> Tensor:
    """The inverse of ``side_by_side``: (B, n, H c) -> (B, H, n, c)."""
    channels = x.shape[2] // heads
    return torch.stack([x[:, :, h * channels : (h + 1) * channels] for h in range(heads)], dim=1)


def rotated(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Rotary positions (RoFormer), token by token: x (B, H, n, d), ``padding_mask`` (B, n), True = padding.

    Channels c and c + d/2 of a token with t real tokens before it turn by the angle t / 10000^(c / (d/2)).
    """
    half = x.shape[3] // 2
    rows = []
    for b in range(x.shape[0]):
        real, tokens = real_tokens(padding_mask, b, x.shape[2]), []
        for i in range(x.shape[2]):
            position = sum(j < i for j in real)
            angles = [position / 10000 ** (c / half) for c in range(half)]
            cos = torch.tensor([math.cos(a) for a in angles], dtype=x.dtype, device=x.device)
            sin = torch.tensor([math.sin(a) for a in angles], dtype=x.dtype, device=x.device)
            first, second = x[b, :, i, :half], x[b, :, i, half:]
            tokens.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        rows.append(torch.stack(tokens, dim=1))
    return torch.stack(rows)


def kept(log_decay: Tensor | None, row: int, real: list[int], query: int, sources: list[int]) -> Tensor | float:
    """The decay of each of ``sources`` at the token ``query``: (H, sources, f or 1); 1.0 without gates.

    The product of exp(log_decay_t) over the ``real`` tokens t after the source, up to the query: ``log_decay`` is
    (B, H, n) or (B, H, n, f).
    """
    if log_decay is None:
        return 1.0
    gates = log_decay[row] if log_decay.dim() == 4 else log_decay[row, :, :, None]  # (H, n, f or 1)
    products = []
    for j in sources:
        product = torch.ones_like(gates[:, query])
        for t in real:
            if j < t <= query:
                product = product * torch.exp(gates[:, t])
        products.append(product)
    return torch.stack(products, dim=1)


def positive_features(x: Tensor, phi: str) -> Tensor:
    """phi(x) of the linear mechanisms, in the shape of ``x``."""
    return {
        "sigmoid": 1 / (1 + torch.exp(-x)),
        "elu+1": torch.where(x > 0, x + 1, torch.exp(x)),
        "relu": torch.where(x > 0, x, 0) + 1e-6,
    }[phi]


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
    """Self-attention, one query at a time, in which position i sees position j if ``sees(i, j, count)``.

    Positions are among the ``count`` real tokens of a row. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e); a
    token that is padding, as a key or as a query, gives 0. Always O(n²).
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
