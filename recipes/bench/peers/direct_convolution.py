"""DAFT-conv by one depthwise convolution with exp(r), and a running sum over the tokens before the window."""

import torch
from torch import Tensor
from torch.nn import functional as F


def daft_conv(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Causal, q, v (B, T, d), k (B, T, h), r (h, window) -> (B, T, d); O(T window d) time.

    All weights are relative to the largest key and in float64, which holds keys down to 600 below it; in float32 keys
    80 below it would give zero divided by zero.
    """
    heads, window = r.shape
    values = v.double().unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, h, T, c)
    keys = k.double().transpose(1, 2)  # (B, h, T)
    weights = torch.exp(keys - keys.amax(2, keepdim=True).detach()).unsqueeze(-1)
    terms = torch.cat([weights * values, weights], dim=-1).permute(0, 3, 1, 2).flatten(0, 1)  # (B (c + 1), h, T)
    near = F.conv1d(F.pad(terms, (window - 1, 0)), torch.exp(r.double()).unsqueeze(1), groups=heads)
    far = F.pad(terms, (window, 0))[..., : terms.shape[2]].cumsum(2)
    sums = (near + far).unflatten(0, (v.shape[0], -1))  # (B, c + 1, h, T)
    mean = (sums[:, :-1] / sums[:, -1:]).permute(0, 3, 2, 1).flatten(2)  # (B, T, d)
    return torch.sigmoid(q) * mean.to(v.dtype)
