"""Counting real tokens, for mechanisms with a maximum number of tokens."""

import torch
from torch import Tensor

from .tracing import is_capturing


def check_real_tokens(x: Tensor, padding_mask: Tensor | None, before: Tensor | None, max_tokens: int) -> Tensor:
    """The number of real tokens so far (B,), with those of x (B, H, n, c); ValueError if it exceeds ``max_tokens``.

    Values are only read if there may be more.
    """
    if before is None and padding_mask is None and x.shape[2] > max_tokens:
        raise ValueError(f"the input has {x.shape[2]} tokens; allowed: at most max_tokens={max_tokens}")
    if padding_mask is not None:
        count = (~padding_mask).sum(1)
        count = count if before is None else before + count
    elif before is not None:
        count = before + x.shape[2]
    else:
        count = torch.full((x.shape[0],), x.shape[2], dtype=torch.long, device=x.device)
    if before is not None or x.shape[2] > max_tokens:
        _check_counts(count, max_tokens)
    return count


def check_real_positions(positions: Tensor, padding_mask: Tensor | None, max_tokens: int) -> None:
    """Raise ValueError if ``positions`` (B, n) of real tokens, from 0, are negative or not below ``max_tokens``."""
    if padding_mask is not None:
        positions = positions.masked_fill(padding_mask, 0)
    if not torch.compiler.is_compiling() and not positions.is_meta and (positions < 0).any():
        raise ValueError(f"positions holds {int(positions.min())}; allowed: numbers from 0")
    _check_counts(positions + 1, max_tokens)


def _check_counts(tokens: Tensor, max_tokens: int) -> None:
    """Raise ValueError if one of the counts ``tokens`` is more than ``max_tokens``.

    While a CUDA graph is captured, values cannot be read, and nothing is checked.
    """
    if torch.compiler.is_compiling():  # a graph must not depend on the values of a tensor
        torch._assert_async((tokens <= max_tokens).all(), f"the input has more tokens than max_tokens={max_tokens}")
    elif not tokens.is_meta and not is_capturing(tokens.device) and (tokens > max_tokens).any():  # meta has no values
        raise ValueError(f"the input has {int(tokens.max())} tokens; allowed: at most max_tokens={max_tokens}")
