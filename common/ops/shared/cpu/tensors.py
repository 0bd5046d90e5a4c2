"""Tensors as kernels get them: addresses and strides."""

import numpy as np
import torch
from torch import Tensor

#: Address, and strides of rows of the batch, heads and tokens.
Address = tuple[int, int, int, int]
#: That of a tensor that is not there.
ABSENT: Address = (0, 0, 0, 0)
_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


def number(value: float, like: Tensor) -> np.floating:
    """``value`` in the dtype of ``like``, for which a kernel is compiled."""
    return _TYPES[like.dtype](value)


def rows(x: Tensor | None) -> Address:
    """x (B, H, n, c), whose channels must be contiguous; ``ABSENT`` for None and for a tensor without numbers."""
    if x is None or x.dim() != 4:
        return ABSENT
    b, h, n, _ = x.stride()
    return x.data_ptr(), b, h, n


def vectors(x: Tensor | None) -> Address:
    """x (B, H, c) as (B, H, 1, c), as ``rows``."""
    if x is None or x.dim() != 3:
        return ABSENT
    return x.data_ptr(), *x.stride()[:2], 0


def numbers(x: Tensor) -> Address:
    """x (B, H, n) as (B, H, n, 1)."""
    return x.data_ptr(), *x.stride()


def contiguous_channels(x: Tensor | None) -> Tensor | None:
    """x, copied if the numbers of its last dimension do not follow each other."""
    return x if x is None or x.is_contiguous() or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """A tensor without values with the shape of x, its channels contiguous and its other dimensions in its order."""
    result = torch.empty_like(x)
    return result if result.is_contiguous() or result.stride(-1) == 1 else x.new_empty(x.shape)
