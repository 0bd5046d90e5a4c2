"""Positions: rotary embeddings of queries and keys, their relative biases, and scaled sinusoids."""

import logging
import math
from typing import Any, Dict, Optional

import torch
from torch import Tensor, nn

from .ops.alignment import real_positions
from .ops.checks import check_choice

logger = logging.getLogger(__name__)

#: Below this many tokens a relative bias is a free vector, from there on a product of two rotated ones (FLASH, Code 6).
TOEPLITZ_LIMIT = 512
RELATIVE_BIASES = ("auto", "toeplitz", "rotary", "none")


def check_even(argument: str, given: int) -> None:
    """Raise ValueError unless ``given`` channels can be rotated in two halves."""
    if given % 2:
        raise ValueError(f"{argument} is {given}; allowed with rotary positions: an even number")


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of the two *halves* of x (RoFormer; FLASH's layout), in x's dtype.

    x (..., n, s) and integer positions (n,) or any shape that broadcasts to (..., n): channels i and i + s/2 turn by
    position · 10000^(-i / (s/2)). O(size of x).

    Raises:
        ValueError: an odd number of channels.
    """
    check_even("the number of channels", x.shape[-1])
    half = x.shape[-1] // 2
    # Angles in half precision would be wrong by whole turns.
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = positions[..., None].to(dtype) * frequency  # (..., n, s/2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def token_positions(x: Tensor, padding_mask: Optional[Tensor], count: Optional[Tensor] = None) -> Tensor:
    """Positions among the real tokens of a sequence, for x (B, H, n, c): (n,), or (B, 1, n) where rows may differ.

    ``padding_mask`` is bool (B, n), True = padding; ``count`` (B,) tokens came before x. O(n).
    """
    positions = torch.arange(x.shape[2], device=x.device)
    if padding_mask is None and count is None:
        return positions
    positions = positions[None] if padding_mask is None else real_positions(padding_mask)  # (1, n) or (B, n)
    return (positions if count is None else positions + count[:, None])[:, None]


class ToeplitzBias(nn.Module):
    """A learned bias per distance of two tokens, for at most N = ``max_positions`` of them: (H, 2N-1) parameters.

    ``bias(tokens)`` is (H, 2·tokens-1), as ``common.ops.gau_attention`` takes it; O(tokens). A state dict may hold the
    bias of more tokens, such as a larger chunk's: its distances up to N are taken. One of fewer is a size mismatch.
    """

    def __init__(self, max_positions: int, heads: int = 1) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(heads, 2 * max_positions - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as every weight of the paper."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: int) -> Tensor:
        """The bias of ``tokens`` tokens, (H, 2·tokens-1); ValueError for more than ``max_positions``."""
        if tokens > self.max_positions:
            raise ValueError(f"the input has {tokens} tokens; allowed by its relative bias: {self.max_positions}")
        return _middle(self.weight, 2 * tokens - 1)

    def takes(self, stored: Any) -> bool:
        """Whether ``stored`` is a weight for at least as many tokens."""
        heads, width = self.weight.shape
        if not isinstance(stored, Tensor) or stored.dim() != 2:
            return False
        return stored.shape[0] == heads and stored.shape[1] >= width and stored.shape[1] % 2 == 1

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *options) -> None:
        """torch's hook of ``load_state_dict``, which works on a copy of the caller's dict."""
        stored, width = state_dict.get(f"{prefix}weight"), self.weight.shape[1]
        if self.takes(stored) and stored.shape[1] > width:
            reach = (stored.shape[1] + 1) // 2
            logger.info(f"{prefix}weight: a relative bias for {reach} tokens is read for {self.max_positions}")
            state_dict[f"{prefix}weight"] = _middle(stored, width)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"max_positions={self.max_positions}, heads={self.weight.shape[0]}"


def _middle(bias: Tensor, width: int) -> Tensor:
    """The ``width`` entries around distance 0 of bias (H, 2N-1)."""
    start = (bias.shape[1] - width) // 2
    return bias[:, start : start + width]


class RotaryBias(nn.Module):
    """A bias rope(a, m)·rope(b, k) of query m and key k, for any number of tokens: two vectors a, b of size s per head.

    It depends on m - k alone, so ``bias(tokens)`` is (H, 2·tokens-1) again; O(tokens · s). ValueError for an odd s.
    """

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__()
        check_even("dim", dim)
        self.a = nn.Parameter(torch.empty(heads, dim))
        self.b = nn.Parameter(torch.empty(heads, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as every weight of the paper."""
        nn.init.normal_(self.a, std=0.02)
        nn.init.normal_(self.b, std=0.02)

    def forward(self, tokens: int) -> Tensor:
        """The bias of ``tokens`` tokens, (H, 2·tokens-1)."""
        distance = torch.arange(1 - tokens, tokens, device=self.a.device)
        rotated = rotate(self.a[:, None].expand(-1, distance.numel(), -1), distance)  # (H, 2·tokens-1, s)
        return (rotated @ self.b[:, :, None]).squeeze(-1)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"dim={self.a.shape[1]}, heads={self.a.shape[0]}"


class ScaledSin(nn.Module):
    """Sinusoidal position embeddings times one learned scalar, 1/√d at first (FLASH, Table 8); any position.

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


def relative_bias(kind: str, tokens: int, dim: int, heads: int = 1) -> Optional[nn.Module]:
    """The module for a ``kind`` of RELATIVE_BIASES over at most ``tokens`` tokens; None for ``none``.

    ``auto`` is the paper's choice: ``toeplitz`` for fewer than 512 tokens, else ``rotary``. ValueError for others.
    """
    check_choice("bias", kind, RELATIVE_BIASES)
    if kind == "auto":
        kind = "toeplitz" if tokens < TOEPLITZ_LIMIT else "rotary"
    if kind == "none":
        return None
    return ToeplitzBias(tokens, heads) if kind == "toeplitz" else RotaryBias(dim, heads)
