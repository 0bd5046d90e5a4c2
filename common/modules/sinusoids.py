"""Sinusoidal position embeddings: fairseq's, and FLASH's with one learned scale."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .rotary import check_even


def sinusoids(numbers: Tensor, dim: int, padding_idx: int) -> Tensor:
    """Rows ``numbers`` (B, n) of fairseq's table of sinusoids, computed without the table: (B, n, ``dim``) in float32.

    The sines of all frequencies come before their cosines; the row ``padding_idx`` is zeros. O(B n d).
    """
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float, device=numbers.device)
    # Computed exactly as in fairseq, since rounding changes the angles of distant positions.
    angles = numbers[..., None].float() * torch.exp(steps * -(math.log(10000) / (half - 1)))
    rows = F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim % 2))
    return rows.masked_fill(numbers[..., None].eq(padding_idx), 0.0)


class ScaledSin(nn.Module):
    """Sinusoidal position embeddings times one learned scalar, initially 1/√d (FLASH, Table 8); any position.

    positions (...,) -> (..., d): d/2 sines, then d/2 cosines, at 10000^(-i / (d/2)). ValueError for an odd d.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_even("dim", dim)
        self.dim = dim
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1/√d."""
        nn.init.constant_(self.scale, 1.0 / math.sqrt(self.dim))

    def forward(self, positions: Tensor) -> Tensor:
        """Integer positions (...,) -> (..., d), in the dtype of the scale."""
        half = self.dim // 2
        frequency = 10000.0 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        angle = positions[..., None].float() * frequency  # (..., d/2)
        return self.scale * torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.scale.dtype)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"dim={self.dim}"
