"""Nyström attention, literally: landmarks segment by segment, three softmaxes, the inverse, the convolution."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def nystrom_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    conv_weight: Tensor | None = None,
    landmarks: int = 64,
    iterations: int = 6,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Xiong et al. 2021, one sequence at a time; shapes as in ``nystrom_attention``.

    For comparison only.
    """
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, k.shape[2])
        queries = [i for i in real_tokens(query_padding_mask, b, q.shape[2]) if i in keys]
        rows = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        if queries and keys:
            real_q, real_k = (x / q.shape[3] ** 0.25 for x in (q[b, :, queries], k[b, :, keys]))
            few_q, few_k = _landmarks(real_q, landmarks), _landmarks(real_k, landmarks)
            first = torch.softmax(real_q @ few_k.transpose(1, 2), dim=-1)
            middle = torch.softmax(few_q @ few_k.transpose(1, 2), dim=-1)
            last = torch.softmax(few_q @ real_k.transpose(1, 2), dim=-1)
            attended = first @ _inverse(middle, iterations) @ (last @ v[b, :, keys])
            for index, i in enumerate(queries):
                rows[i] = attended[:, index]
        if conv_weight is not None:
            for index, i in enumerate(keys):
                if i in queries:
                    rows[i] = rows[i] + _convolved(v[b, :, keys], conv_weight[:, 0, :, 0].to(v.dtype), index)
        out.append(torch.stack(rows, dim=1))  # (H, n, e)
    return torch.stack(out)  # (B, H, n, e)


def _landmarks(x: Tensor, landmarks: int) -> Tensor:
    """The mean of each segment that has tokens: (H, n, d) -> (H, at most m, d)."""
    n = x.shape[1]
    segments = ([index for index in range(n) if index * landmarks // n == s] for s in range(landmarks))
    return torch.stack([x[:, segment].mean(1) for segment in segments if segment], dim=1)


def _inverse(a: Tensor, iterations: int) -> Tensor:
    """The approximate pseudoinverse of each matrix of a (H, rows, columns)."""
    identity = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    norms = [matrix.sum(0).max() * matrix.sum(1).max() for matrix in a]
    z = torch.stack([matrix.T / norm for matrix, norm in zip(a, norms)])
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


def _convolved(v: Tensor, weight: Tensor, place: int) -> Tensor:
    """The sum over the tokens around ``place`` of v (H, n, e), times weight (H, K): (H, e)."""
    kernel = weight.shape[1]
    around = [(t, place + t - kernel // 2) for t in range(kernel)]
    return sum(weight[:, t, None] * v[:, j] for t, j in around if 0 <= j < v.shape[1])
