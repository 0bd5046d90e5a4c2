"""Gates by which sums decay: their checks, and their values at padding.

A gate is log_decay <= 0, finite: before token t is added, a sum is multiplied by exp(log_decay_t). Legend: B batch,
H heads, n tokens, f features of a query or key, the rows of a sum.
"""

import torch
from torch import Tensor

from .checks import ArgumentError


def check_log_decay(log_decay: Tensor | None, causal: bool, like: Tensor, features: int) -> None:
    """Raise ValueError unless ``log_decay`` is None, or (B, H, n) or (B, H, n, f) for ``like`` (B, H, n, c).

    Values are not checked: positive ones, which make sums grow, are the caller's responsibility.
    """
    if log_decay is None:
        return
    if not causal:
        raise ArgumentError("`log_decay` is given with causal=False; allowed: only with causal=True")
    allowed = (tuple(like.shape[:3]), (*like.shape[:3], features))
    if not isinstance(log_decay, Tensor) or tuple(log_decay.shape) not in allowed:
        actual = tuple(log_decay.shape) if isinstance(log_decay, Tensor) else f"a {type(log_decay).__name__}"
        raise ValueError(f"log_decay is {actual}; allowed: a tensor {allowed[0]}, by head, or {allowed[1]}, by channel")
    if not log_decay.is_floating_point() or log_decay.device != like.device:
        raise ValueError(
            f"log_decay is {log_decay.dtype} on {log_decay.device}; allowed: floating point, on {like.device}"
        )


def decay_of_real_tokens(log_decay: Tensor | None, padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``log_decay`` in ``dtype``, 0 at padding (B, n; True = padding), so that sums do not decay there."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype)
    if padding_mask is None:
        return log_decay
    return log_decay.masked_fill(padding_mask[:, None] if log_decay.dim() == 3 else padding_mask[:, None, :, None], 0.0)
