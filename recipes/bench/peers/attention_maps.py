"""References that write attention out as a map of all queries and keys: any dtype, any device, O(n²) memory."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's softmax attention without fusing: q, k, v (..., n, d) -> (..., n, d)."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal softmax attention to the last ``window`` tokens: q, k, v (..., n, d) -> (..., n, d)."""
    visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril().triu(1 - window)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def mixed_chunk_attention(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, *, chunk_size: int, bias: Tensor | None
) -> Tensor:
    """FLASH's causal attention (ICML 2022, equation 8) with relu²: q, k (..., n, s), v (..., n, e) -> (..., n, e).

    The weight is relu(q_quad·k_quad / C + bias)² up to the query in its chunk of C tokens, q_lin·k_lin / C before it.
    ``bias``: (2C-1,), entry r + C - 1 for a query r tokens after its key, or with heads (H, 2C-1).
    """
    n = v.shape[-2]
    position = torch.arange(n, device=v.device)
    distance = position[:, None] - position  # (n, n)
    chunk = position // chunk_size
    scores = q_quad @ k_quad.transpose(-2, -1) / chunk_size
    if bias is not None:
        scores = scores + bias[..., (distance + chunk_size - 1).clamp(0, 2 * chunk_size - 2)]
    inside = (chunk[:, None] == chunk) & (distance >= 0)
    quadratic = F.relu(scores).square().masked_fill(~inside, 0.0)
    linear = (q_lin @ k_lin.transpose(-2, -1) / chunk_size).masked_fill(chunk[:, None] <= chunk, 0.0)
    return (quadratic + linear) @ v


def relu_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention with relu features and 1e-6 as in ``common.ops.linear_attention``, as a map."""
    weights = ((F.relu(q) + 1e-6) @ (F.relu(k) + 1e-6).transpose(-2, -1)).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def daft_conv(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Causal DAFT-conv (its equations 5 and 7): q, v (B, T, d), k (B, T, h), r (h, window) -> (B, T, d).

    The weight of token t' is exp(k + r) inside the window of t and exp(k) before it, divided by their sum.
    """
    tokens, (heads, window) = v.shape[1], r.shape
    position = torch.arange(tokens, device=v.device)
    distance = position[:, None] - position  # (T, T)
    bias = r[:, (window - 1 - distance).clamp(0, window - 1)].masked_fill(distance >= window, 0.0)  # (h, T, T)
    logits = k.transpose(1, 2).unsqueeze(2) + bias.masked_fill(distance < 0, -torch.inf)  # (B, h, T, T)
    values = v.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, h, T, d / h)
    return torch.sigmoid(q) * (logits.softmax(-1) @ values).transpose(1, 2).flatten(2)
