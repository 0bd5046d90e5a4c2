"""Elementwise running sums over tokens with decay: y_t = exp(log_decay_t) y_(t-1) + x_t."""

import torch
from torch import Tensor

from .blocked_cumsum import cumsum_in_blocks
from .cpu import cumsum, dispatch


def decayed_cumsum(x: Tensor, log_decay: Tensor, initial: Tensor | None) -> Tensor:
    """y for x (B, H, n, ...), in the same shape; O(size of x).

    ``log_decay``, at most 0, is (B, H, n, ...), with dimensions of size 1 where it is shared. ``initial`` (B, H, ...)
    is y before the first token, zero when None. On a CPU by kernels, otherwise as ``cumsum_in_blocks``.
    """
    if x.shape[2] > 1 and dispatch.applies(*(y for y in (x, log_decay, initial) if y is not None)):
        return cumsum.decayed_cumsum(x, log_decay, initial)
    return cumsum_in_blocks(x, log_decay, torch.zeros_like(x[:, :, 0]) if initial is None else initial)
