"""Sinusoidal position embeddings with one learned scale."""

import math

import torch
from torch import Tensor, nn

from .rotary import check_even


class ScaledSin(nn.Module):
    """Sinusoidal position embeddings times one learned scalar, initially 1/√d (FLASH, Table 8); any position.

    positions (...,) -> (..., d): d/2 sines, then d/2 cosines, at 10000^(-i / (d/2)). ValueError for an odd d.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_even("dim", dim)
        self.dim = dim
        self.scale = nn.Parameter(torch.full((1,), 1.0 / math.sqrt(dim)))

    def forward(self, positions: Tensor) -> Tensor:
        """Integer positions (...,) -> (..., d), in the dtype of the scale."""
        half = self.dim // 2
        frequency = 10000.0 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        angle = positions[..., None].float() * frequency  # (..., d/2)
        return self.scale * torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.scale.dtype)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"dim={self.dim}"
