"""DAFT-conv: attention without dot products, by key and by distance inside a window, global outside of it.

*A Dot Product Attention Free Transformer*, equations 7-9.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..shared.cpu.dispatch import step_of
from ..shared.held_tokens import held_length
from ..shared.packed import takes_segments
from ..shared.precision import autocast_off, in_dtype
from ..shared.state import State, check_continuation, state_of_sums
from . import conv_decoding
from .conv_causal import attend_causal
from .conv_centred import attend_centred, attend_raster
from .heads import check_windowed, gate_heads, split_heads


@takes_segments("q", "k", "v")
def daft_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    *,
    causal: bool = False,
    spatial_shape: Sequence[int] | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    local_only: bool = False,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """sigmoid(q) ⊙ Σ exp(k_t' + w_tt') v_t' / Σ exp(k_t' + w_tt'), w the filter r in a window and 0 outside (Eq. 7-9).

    B batch, T tokens, d channels, h heads, each with one key per token and d / h channels of v: q and v (B, T, d), k
    (B, T, h) -> (B, T, d) in v's dtype; q = None omits the sigmoid (Table 8). Filters: r (h, window), or (h, kh, kw)
    for T tokens that are the raster of ``spatial_shape`` (H, W) of any size. Centred windows have odd sizes and r[:, j]
    weighs the token at t + j - window // 2; a causal window ends with the token itself, r[:, -1 - j] weighs the token j
    steps back, and later tokens are not seen. ``key_padding_mask``: bool (B, T), True = padding, on any side; positions
    in a sequence count real tokens, positions in an image do not move, and a padded token gives 0. ``local_only``: w is
    -inf outside of the window, so a token sees nothing else (ablation of Figure 2). Cost: O(T window d) time,
    O(T d) memory. Exponentials are taken relative to maxima over what a token sees, or in float64.

    ``initial_state`` and ``return_state`` (causal) continue a sequence. The state is ``count`` (B,) real tokens so far,
    ``k`` (B, h, L) and ``v`` (B, h, L, d / h) of the last L <= window tokens, newest last, and for all earlier tokens
    ``mean`` (B, h, d / h) and ``log_weight`` (B, h): the quotient of the two sums and the logarithm of the second. With
    ``local_only`` both keep their initial values.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask or state that does not fit; heads that do not divide d; an even window that is
            not causal; a ``spatial_shape`` of a causal sequence, without a 2-D filter or not of T tokens; a state
            without ``causal``.
    """
    _check(q, k, v, r, causal, spatial_shape, key_padding_mask)
    check_continuation(causal, initial_state, return_state)
    keys, values = split_heads(k, v, key_padding_mask)  # (B, h, T), (B, h, T, c)
    state = None
    with autocast_off(v):
        filters = r.to(values.dtype)
        if initial_state is not None or return_state:
            shapes = conv_decoding.state_shapes(values, held_length(initial_state, "k", filters.shape[1]))
            initial_state = state_of_sums(initial_state, shapes, values.dtype, v)
        if not causal:
            out = attend_centred(keys, values, filters, spatial_shape, key_padding_mask, local_only)
        elif initial_state is None and not return_state:
            out = attend_causal(keys, values, filters, key_padding_mask, local_only)
        else:
            state = conv_decoding.empty_state(values, shapes) if initial_state is None else initial_state
            extend = conv_decoding.step if v.shape[1] == 1 else conv_decoding.several
            out, state = extend(keys, values, filters, key_padding_mask, state, local_only)
        out = gate_heads(q, out, v.dtype, key_padding_mask)
    return (out, state) if return_state else out


@step_of(daft_conv)
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, r: Tensor, local_only: bool, **_: Any
) -> tuple[Tensor, State]:
    """``daft_conv`` of one token after ``state``; see ``step_of``."""
    filters = in_dtype(r, v.dtype)
    held_length(state, "k", filters.shape[1])  # ValueError if it lost tokens of the window, as its count shows
    out, state = conv_decoding.step(*split_heads(k, v, None), filters, None, state, local_only)
    return gate_heads(q, out, v.dtype, None), state


def daft_conv_in_torchscript(
    q: Tensor | None, k: Tensor, v: Tensor, r: Tensor, height: int, width: int, local_only: bool
) -> Tensor:
    """``daft_conv`` of whole images, ``causal=False`` and no mask, for callers inside TorchScript.

    Arguments are not checked; shapes and cost as in ``daft_conv``.
    """
    keys, values = split_heads(k, v, None)
    out = attend_raster(keys, values, r.to(values.dtype), height, width, None, local_only)
    return gate_heads(q, out, v.dtype, None)


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    causal: bool,
    shape: Sequence[int] | None,
    padding_mask: Tensor | None,
) -> None:
    """Raise ValueError for arguments that do not fit; the state is checked elsewhere."""
    if not isinstance(r, Tensor) or r.dim() not in (2, 3) or not r.is_floating_point() or 0 in r.shape:
        content = f"{tuple(r.shape)}, {r.dtype}" if isinstance(r, Tensor) else type(r).__name__
        raise ValueError(f"r is {content}; allowed: floating point (heads, window) or (heads, height, width)")
    check_windowed(q, k, v, r.shape[0], tuple(r.shape[1:]), ("r", "r"), causal, shape, padding_mask)
    if r.device != v.device:
        raise ValueError(f"r is on {r.device}; allowed: the device of the input, {v.device}")
