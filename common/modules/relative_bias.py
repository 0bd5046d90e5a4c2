"""Relative position biases on scores: a free vector over distances, or two rotated vectors."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.shared.checks import check_choice, check_table
from .rotary import check_even, rotate

logger = logging.getLogger(__name__)

#: For fewer tokens ``auto`` is toeplitz, else rotary, as in FLASH's pseudocode: the number of free parameters, one per
#: distance, grows with the tokens, that of two rotated vectors does not.
TOEPLITZ_LIMIT = 512
RELATIVE_BIASES = ("auto", "toeplitz", "rotary", "none")


class ToeplitzBias(nn.Module):
    """A learned bias per distance of two tokens, for at most N = ``max_positions`` of them: (H, 2N-1) parameters.

    ``bias(tokens)`` is (H, 2·tokens-1), as ``common.ops.gau_attention`` expects it; O(tokens). A state dict may hold a
    bias for more tokens, such as a larger chunk's: its distances up to N are loaded. One for fewer is a size mismatch.
    """

    def __init__(self, max_positions: int, heads: int = 1) -> None:
        super().__init__()
        check_table("max_positions", max_positions, (heads, 2 * max_positions - 1))
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(heads, 2 * max_positions - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise from N(0, 0.02), as the weights of gated attention units."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: int) -> Tensor:
        """The bias for ``tokens`` tokens, (H, 2·tokens-1); ValueError for more than ``max_positions``."""
        if tokens > self.max_positions:
            raise ValueError(f"the input has {tokens} tokens; allowed by its relative bias: {self.max_positions}")
        return _middle(self.weight, 2 * tokens - 1)

    def takes_stored(self, stored: Any) -> bool:
        """Whether ``stored`` is a weight for at least as many tokens."""
        heads, width = self.weight.shape
        if not isinstance(stored, Tensor) or stored.dim() != 2:
            return False
        return stored.shape[0] == heads and stored.shape[1] >= width and stored.shape[1] % 2 == 1

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options) -> None:
        """torch's hook of ``load_state_dict``, which works on a copy of the caller's dict."""
        stored, width = state_dict.get(f"{prefix}weight"), self.weight.shape[1]
        if self.takes_stored(stored) and stored.shape[1] > width:
            tokens = (stored.shape[1] + 1) // 2
            logger.info(f"{prefix}weight: a relative bias for {tokens} tokens is read for {self.max_positions}")
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

    It depends only on m - k, so ``bias(tokens)`` is (H, 2·tokens-1), too; O(tokens · s). ValueError for an odd s.
    """

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__()
        check_even("dim", dim)
        self.a = nn.Parameter(torch.empty(heads, dim))
        self.b = nn.Parameter(torch.empty(heads, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise from N(0, 0.02), as the weights of gated attention units."""
        nn.init.normal_(self.a, std=0.02)
        nn.init.normal_(self.b, std=0.02)

    def forward(self, tokens: int) -> Tensor:
        """The bias for ``tokens`` tokens, (H, 2·tokens-1)."""
        distance = torch.arange(1 - tokens, tokens, device=self.a.device)
        rotated = rotate(self.a[:, None].expand(-1, distance.numel(), -1), distance)  # (H, 2·tokens-1, s)
        return (rotated @ self.b[:, :, None]).squeeze(-1)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"dim={self.a.shape[1]}, heads={self.a.shape[0]}"


def relative_bias(kind: str, tokens: int, dim: int, heads: int = 1) -> nn.Module | None:
    """The module for a ``kind`` of RELATIVE_BIASES over at most ``tokens`` tokens; None for ``none``.

    ``auto`` is ``toeplitz`` for fewer than 512 tokens, else ``rotary``, and says which in the log. ValueError for an
    unknown kind.
    """
    check_choice("bias", kind, RELATIVE_BIASES)
    if kind == "auto":
        kind = _chosen(tokens)
    if kind == "none":
        return None
    return ToeplitzBias(tokens, heads) if kind == "toeplitz" else RotaryBias(dim, heads)


@functools.cache  # a line for all layers of a model
def _chosen(tokens: int) -> str:
    """The bias that ``auto`` is for so many tokens."""
    kind = "toeplitz" if tokens < TOEPLITZ_LIMIT else "rotary"
    logger.info(f"the relative bias for {tokens} tokens is {kind}: auto is toeplitz below {TOEPLITZ_LIMIT} tokens")
    return kind
