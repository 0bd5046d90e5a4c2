"""Checks, heads, alignment and gate of DAFT-conv and DAFT-select, which have one key per head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shared.checks import check_gate_key_value, check_padding_mask, check_spatial_shape
from ..shared.padding import real_first, take, zero_padded_tokens, zero_padding
from ..shared.precision import compute_dtype


def check_windowed(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    heads: int,
    window: tuple[int, ...],
    names: tuple[str, str],
    causal: bool,
    shape: Sequence[int] | None,
    padding_mask: Tensor | None,
) -> None:
    """Raise ValueError unless k (B, T, heads), q and v (B, T, d), mask, window and ``spatial_shape`` fit together.

    ``names`` are the arguments from which heads and window come.
    """
    check_gate_key_value(q, k, v, key_channels=heads)
    if v.shape[2] % heads:
        raise ValueError(f"{names[0]} has {heads} heads; allowed: a divisor of the channels, {v.shape[2]}")
    if not causal and any(size % 2 == 0 for size in window):
        raise ValueError(f"{names[1]} has the window {window}; allowed when not causal: odd sizes")
    if (shape is None) != (len(window) == 1) or (causal and shape is not None):
        raise ValueError(
            f"spatial_shape is {shape} with a window of {window} and causal={causal}; allowed: (height, width) with a "
            "window of two sizes and causal=False, or None with a window of one"
        )
    if shape is not None:
        check_spatial_shape(shape, v.shape[1])
    check_padding_mask("key_padding_mask", padding_mask, v.unsqueeze(1))


def split_heads(k: Tensor, v: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """k (B, T, h) and v (B, T, d) -> (B, h, T) and (B, h, T, d / h) in the dtype for sums, 0 at padding; O(T d)."""
    dtype = compute_dtype(v)
    keys = zero_padded_tokens(k.to(dtype), padding_mask)
    values = zero_padded_tokens(v.to(dtype), padding_mask)
    return keys.transpose(1, 2), values.unflatten(2, [k.shape[2], -1]).transpose(1, 2)


def align_heads(
    k: Tensor, v: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys (B, h, T), values (B, h, T, c) and mask with real tokens first, and their order for ``put_back``; O(T c)."""
    if padding_mask is None:
        return k, v, None, None
    order = real_first(padding_mask)
    return take(k.unsqueeze(-1), order).squeeze(-1), take(v, order), padding_mask.gather(1, order), order


def gate_heads(q: Tensor | None, out: Tensor, dtype: torch.dtype, padding_mask: Tensor | None) -> Tensor:
    """sigmoid(q) times ``out`` (B, h, T, d / h), as (B, T, d) in ``dtype`` and 0 at padding; O(T d)."""
    out = zero_padding(out, padding_mask).transpose(1, 2).flatten(2)  # (B, T, d)
    if q is not None:
        out = torch.sigmoid(zero_padded_tokens(q.to(out.dtype), padding_mask)) * out
    return out.to(dtype)
