"""DAFT-conv whose filters have one entry each: the neighbour that a head selected is indexed.

*A Dot Product Attention Free Transformer*, equation 11 at inference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shared.packed import takes_segments
from ..shared.padding import put_back
from ..shared.precision import autocast_off
from .conv_causal import attend_causal
from .heads import align_heads, check_windowed, gate_heads, split_heads
from .weighted_means import WeightedMean, empty_log_weight, exponentials, mean_of_sums, merge, sums_before


@takes_segments("q", "k", "v")
def daft_select(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    bias: Tensor,
    *,
    window: int | tuple[int, int],
    causal: bool = False,
    spatial_shape: Sequence[int] | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """``daft_conv`` with filters that are ``bias`` at ``index`` and 0 elsewhere: a head selects a neighbour (Eq. 11).

    B batch, T tokens, d channels, h heads: q (or None), v (B, T, d), k (B, T, h) -> (B, T, d), ``key_padding_mask`` and
    ``spatial_shape`` as in ``daft_conv``; index int64 (h,) into the flattened ``window``, which is a number of tokens
    or, for images, a pair (height, width), odd unless causal; bias (h,). A neighbour that is outside of the input or
    padding adds nothing. Cost: O(T d) time and memory without a convolution; causal, that of ``daft_conv``, which is
    faster there.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask or window that does not fit; an index outside of the window (not checked
            while a graph is traced).
    """
    sizes = _check(q, k, v, index, bias, window, causal, spatial_shape, key_padding_mask)
    keys, values = split_heads(k, v, key_padding_mask)  # (B, h, T), (B, h, T, c)
    with autocast_off(v):
        bias = bias.to(values.dtype)
        if causal:
            filters = bias.new_zeros(len(index), sizes[1]).scatter(1, index[:, None], bias[:, None])
            out = attend_causal(keys, values, filters, key_padding_mask, False)
        elif spatial_shape is not None:  # tokens of an image keep their positions, even if others are padding
            height, width = spatial_shape
            out = _raster(keys, values, index, bias, sizes, height, width, key_padding_mask)
        else:
            keys, values, padding, order = align_heads(keys, values, key_padding_mask)
            out = put_back(_raster(keys, values, index, bias, sizes, 1, v.shape[1], padding), order)
        return gate_heads(q, out, v.dtype, key_padding_mask)


def daft_select_in_torchscript(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    bias: Tensor,
    window: tuple[int, int],
    height: int,
    width: int,
) -> Tensor:
    """``daft_select`` of whole images, ``causal=False`` and no mask, for callers inside TorchScript.

    Arguments are not checked; shapes and cost as in ``daft_select``.
    """
    keys, values = split_heads(k, v, None)
    out = _raster(keys, values, index, bias.to(values.dtype), window, height, width, None)
    return gate_heads(q, out, v.dtype, None)


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    bias: Tensor,
    window: int | tuple[int, int],
    causal: bool,
    shape: Sequence[int] | None,
    padding_mask: Tensor | None,
) -> tuple[int, int]:
    """The window as (height, width), of one row for a sequence; ValueError for anything that does not fit."""
    sizes = window if isinstance(window, (tuple, list)) else (window,)
    if len(sizes) not in (1, 2) or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in sizes):
        raise ValueError(f"window is {window!r}; allowed: an integer of at least 1, or two of them")
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype != torch.int64 or index.shape[0] == 0:
        content = f"{tuple(index.shape)}, {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
        raise ValueError(f"index is {content}; allowed: torch.int64 (heads,)")
    check_windowed(q, k, v, index.shape[0], tuple(sizes), ("index", "window"), causal, shape, padding_mask)
    if not isinstance(bias, Tensor) or bias.shape != index.shape or not bias.is_floating_point():
        content = f"{tuple(bias.shape)}, {bias.dtype}" if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias is {content}; allowed: floating point {tuple(index.shape)}, as index")
    for name, x in (("index", index), ("bias", bias)):
        if x.device != v.device:
            raise ValueError(f"{name} is on {x.device}; allowed: the device of the input, {v.device}")
    height, width = (1, *sizes)[-2:]
    # Entries have no values in a traced graph or on the meta device.
    if not torch.compiler.is_compiling() and index.device.type != "meta":
        if bool(((index < 0) | (index >= height * width)).any()):
            raise ValueError(f"index is {index.tolist()}; allowed in a window of {window}: 0 to {height * width - 1}")
    return height, width


def _raster(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    bias: Tensor,
    window: tuple[int, int],
    height: int,
    width: int,
    padding_mask: Tensor | None,
) -> Tensor:
    """A whole image, or a sequence as one of a single row: (B, h, T) and (B, h, T, c) -> (B, h, T, c)."""
    position = torch.arange(v.shape[2], device=v.device)
    down = torch.div(index, window[1], rounding_mode="floor") - window[0] // 2  # (h,)
    across = index % window[1] - window[1] // 2
    row = torch.div(position, width, rounding_mode="floor") + down[:, None]  # (h, T)
    column = position % width + across[:, None]
    exists = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    neighbour = (row * width + column).masked_fill(~exists, 0)
    terms, scale = exponentials(k, v, padding_mask)  # (B, h, T, c + 1)
    # The sums before and after the neighbour; the sum of all minus the neighbour could cancel.
    around = _sums_before(terms) + _sums_before(terms.flip([2])).flip([2])
    others = torch.where(exists[..., None], _at(around, neighbour), terms.sum(2, keepdim=True))
    return _add_neighbour(k, v, bias, neighbour, exists, padding_mask, others, scale)


def _sums_before(x: Tensor) -> Tensor:
    """The sum over the tokens before each token of x (B, h, T, c)."""
    return sums_before(x.transpose(2, 3), 1).transpose(2, 3)


def _at(x: Tensor, place: Tensor) -> Tensor:
    """The tokens of x (B, h, T, c) at ``place`` (h, T), which differs from head to head: (B, h, T, c)."""
    return x.gather(2, place[None, :, :, None].expand_as(x))


def _add_neighbour(
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    neighbour: Tensor,
    exists: Tensor,
    padding_mask: Tensor | None,
    others: Tensor,
    scale: Tensor,
) -> Tensor:
    """The mean over ``others``, sums relative to exp(``scale``), and the neighbour, whose key gets ``bias`` (h,)."""
    keys = k + bias[:, None]  # (B, h, T)
    if padding_mask is not None:
        keys = keys.masked_fill(padding_mask[:, None], empty_log_weight())
    log_weight = _at(keys.unsqueeze(-1), neighbour).masked_fill(~exists[..., None], empty_log_weight())
    other_mean = mean_of_sums(others[..., :-1], others[..., -1:], scale)
    return merge(WeightedMean(_at(v, neighbour), log_weight), other_mean).mean
