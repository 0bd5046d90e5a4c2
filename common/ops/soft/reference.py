"""Softmax-free attention, literally: landmarks window by window, the kernel, its inverse, the convolution."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.reference_tools import real_tokens


def soft_attention_reference(
    q: Tensor,
    v: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    spatial_shape: Sequence[int],
    conv_weight: Tensor | None = None,
    iterations: int = 20,
    ridge: float = 0.01,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Lu et al. 2021, one head of one image at a time; shapes as in ``soft_attention``. For comparison only."""
    height, width = spatial_shape
    r = landmark_weight.shape[2]
    out = []
    for b in range(q.shape[0]):
        keys = real_tokens(key_padding_mask, b, v.shape[2])
        queries = [i for i in real_tokens(query_padding_mask, b, v.shape[2]) if i in keys]
        for h in range(q.shape[1]):
            x = q[b, h] / q.shape[3] ** 0.25
            windows: dict[tuple[int, int], list[int]] = {}
            for j in keys:
                windows.setdefault((j // width // r, j % width // r), []).append(j)
            landmarks = []
            for window in windows.values():
                terms = [landmark_weight[:, :, j // width % r, j % width % r].to(x.dtype) @ x[j] for j in window]
                normed = F.layer_norm(sum(terms), (x.shape[1],), norm_weight.to(x.dtype), norm_bias.to(x.dtype))
                landmarks.append(F.gelu(normed))
            rows = [torch.zeros_like(v[b, h, 0]) for _ in range(height * width)]
            if landmarks:
                inverse = _inverse(_kernel(landmarks, landmarks), iterations, ridge)
                sums = inverse @ _kernel([x[j] for j in keys], landmarks).T @ v[b, h, keys]
            for i in queries:
                if landmarks:
                    rows[i] = (_kernel([x[i]], landmarks) @ sums)[0]
                if conv_weight is not None:
                    near = _near(i, keys, width, conv_weight.shape[2])
                    rows[i] = rows[i] + sum(conv_weight[h, 0, y, z].to(v.dtype) * v[b, h, j] for y, z, j in near)
            out.append(torch.stack(rows))
    return torch.stack(out).unflatten(0, q.shape[:2])  # (B, H, n, e)


def _kernel(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """exp(-|a - b|² / 2) of every a of ``some`` and b of ``others``."""
    return torch.stack([torch.stack([torch.exp(-((a - b) ** 2).sum() / 2) for b in others]) for a in some])


def _inverse(a: Tensor, iterations: int, ridge: float) -> Tensor:
    """The approximate inverse of a + ridge."""
    a = a + ridge * torch.eye(len(a), dtype=a.dtype, device=a.device)
    z = 1.8 / a.sum(1).max() ** 2 * a
    for _ in range(iterations):
        z = 2 * z - z @ a @ z
    return z


def _near(i: int, keys: list[int], width: int, kernel: int) -> list[tuple[int, int, int]]:
    """The tokens of ``keys`` under a square filter around i: row and column in the filter, and the token."""
    found = []
    for j in keys:
        y, z = j // width - i // width + kernel // 2, j % width - i % width + kernel // 2
        if 0 <= y < kernel and 0 <= z < kernel:
            found.append((y, z, j))
    return found
