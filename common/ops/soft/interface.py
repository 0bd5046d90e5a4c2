"""Softmax-free attention to images: a Gaussian kernel of queries, through landmarks on the image's grid.

Lu, Yao, Zhang, Zhu, Xu, Gao, Xu, Xiang, Zhang, *SOFT: Softmax-free Transformer with Linear Complexity*, NeurIPS 2021.
The released code adds 0.01 to the diagonal before the inversion, and starts the iteration from the largest row sum of
the matrix without it; here the iteration starts from that of the inverted matrix, for any ridge.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import (
    ArgumentError,
    check_masks,
    check_positive_int,
    check_query_key_value,
    check_spatial_shape,
)
from ..shared.depthwise import depthwise_conv2d
from ..shared.padding import either_mask, zero_padding
from ..shared.precision import autocast_off, compute_dtype

#: Each step doubles rounding errors in directions outside the kernel's range: in float32 they are 0.00001 of the result
#: after 20 steps, the authors' number.
MOST_ITERATIONS = 20


def soft_attention(
    q: Tensor,
    v: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    spatial_shape: Sequence[int],
    conv_weight: Tensor | None = None,
    iterations: int = 20,
    ridge: float = 0.01,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """κ(x, l) Z κ(l, x) v + conv(v), with κ(a, b) = exp(-|a - b|² / 2), x = q / d^(1/4) and m landmarks l of x.

    Queries are also the keys; nothing is normalised. The tokens are the raster of ``spatial_shape`` (Y, X). Landmarks
    are gelu(layer_norm(c)): c is the convolution of x with ``landmark_weight`` (d, d, r, r) and stride r, with zeros in
    place of padding and beyond the edge, ``norm_weight`` and ``norm_bias`` are (d,); a window without real tokens has
    no landmark. Z is 1.8 A / |A|∞² after ``iterations`` steps Z ← 2 Z - Z A Z, separately for each A = κ(l, l) with
    ``ridge`` added to its diagonal. With ``conv_weight`` (H, 1, K, K), K odd, a depthwise convolution of v is added. q
    (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a token that is
    padding, as a key or as a query, gives 0, a padded key is not seen, and tokens of an image keep their positions.
    Cost: O(n m (d + e) + m³ + n (d² + K² e)) time, O(n m + m²) memory; with m = n / r², n m is linear only if r grows
    with the image.

    Raises:
        ValueError: a shape, mask or number that does not fit.
    """
    check_positive_int("iterations", iterations)
    if iterations > MOST_ITERATIONS:
        raise ArgumentError(f"`iterations` is {iterations}; allowed: at most {MOST_ITERATIONS}")
    if isinstance(ridge, bool) or not isinstance(ridge, (int, float)) or not 0.0 <= ridge < float("inf"):
        raise ArgumentError(f"`ridge` is {ridge!r}; allowed: a number of at least 0")
    check_query_key_value(q, q, v, one_length=True, names=("q", "q", "v"))
    check_spatial_shape(spatial_shape, v.shape[2])
    check_masks(key_padding_mask, v, query_padding_mask, v)
    _check_parameters(q, landmark_weight, norm_weight, norm_bias, conv_weight)
    with autocast_off(q):
        height, width = spatial_shape
        dtype = compute_dtype(q)
        x, v_dtype = zero_padding(q.to(dtype), key_padding_mask) * q.shape[3] ** -0.25, v.dtype
        v = zero_padding(v.to(dtype), key_padding_mask)
        landmarks = _landmarks(x, landmark_weight.to(dtype), height, width)
        landmarks = F.gelu(F.layer_norm(landmarks, [x.shape[3]], norm_weight.to(dtype), norm_bias.to(dtype)))
        # A landmark without a real token has rows and columns of zeros.
        few = _kernel(landmarks, landmarks)  # (B, H, m, m)
        many = _kernel(x, landmarks)  # (B, H, n, m)
        if key_padding_mask is not None:
            empty = _empty_windows(key_padding_mask, landmark_weight.shape[2], height, width)  # (B, m)
            many = many.masked_fill(empty[:, None, None], 0.0)
            few = few.masked_fill((empty.unsqueeze(1) | empty.unsqueeze(2)).unsqueeze(1), 0.0)
        sums = zero_padding(many, key_padding_mask).transpose(2, 3) @ v  # (B, H, m, e)
        out = many @ (_inverse(few, iterations, ridge) @ sums)
        if conv_weight is not None:
            maps = v.permute(0, 3, 1, 2).flatten(0, 1).unflatten(2, [height, width])  # (B e, H, Y, X)
            near = depthwise_conv2d(maps, conv_weight.to(dtype))
            out = out + near.flatten(2).unflatten(0, [v.shape[0], v.shape[3]]).permute(0, 2, 3, 1)
        return zero_padding(out, either_mask(query_padding_mask, key_padding_mask)).to(v_dtype)


def _landmarks(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """x (B, H, n, d) convolved with weight (d, d, r, r), stride r, zeros beyond the edge: (B, H, m, d)."""
    batch, heads, ratio = x.shape[0], x.shape[1], weight.shape[2]
    maps = x.transpose(2, 3).flatten(0, 1).unflatten(2, [height, width])  # (B H, d, Y, X)
    maps = F.pad(maps, [0, _missing(width, ratio), 0, _missing(height, ratio)])
    return F.conv2d(maps, weight, stride=ratio).flatten(2).transpose(1, 2).unflatten(0, [batch, heads])


def _empty_windows(padding_mask: Tensor, ratio: int, height: int, width: int) -> Tensor:
    """True for landmarks without real tokens: padding_mask (B, n) -> (B, m)."""
    real = F.pad((~padding_mask).unflatten(1, [height, width]), [0, _missing(width, ratio), 0, _missing(height, ratio)])
    windows = real.unflatten(2, [-1, ratio]).unflatten(1, [-1, ratio])  # (B, Y / r, r, X / r, r)
    return ~windows.any(4).any(2).flatten(1)


def _missing(size: int, ratio: int) -> int:
    """The number to add to ``size`` to make it a multiple of ``ratio``."""
    return (ratio - size % ratio) % ratio


def _kernel(x: Tensor, others: Tensor) -> Tensor:
    """exp(-|a - b|² / 2) for x (B, H, n, d) and others (B, H, m, d): (B, H, n, m)."""
    lengths = x.square().sum(-1, keepdim=True) + others.square().sum(-1).unsqueeze(2)
    return (x @ others.transpose(2, 3) - lengths / 2).exp()


def _inverse(a: Tensor, iterations: int, ridge: float) -> Tensor:
    """The approximate inverse of each matrix of a (B, H, m, m) + ``ridge``; O(m³)."""
    # Each matrix has its own start, independent of the rest of the batch. Without tokens it is all zeros, except for
    # the ridge.
    a = a + ridge * torch.eye(a.shape[3], dtype=a.dtype, device=a.device)
    norm = a.sum(3).amax(2)
    z = 1.8 * a / norm.masked_fill(norm == 0.0, 1.0).square()[..., None, None]
    for _ in range(iterations):
        z = 2.0 * z - z @ a @ z
    return z


def _check_parameters(
    q: Tensor, landmark_weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, conv_weight: Tensor | None
) -> None:
    heads, channels = q.shape[1], q.shape[3]
    shapes = {
        "landmark_weight": (landmark_weight, (channels, channels, *landmark_weight.shape[-1:] * 2)),
        "norm_weight": (norm_weight, (channels,)),
        "norm_bias": (norm_bias, (channels,)),
    }
    if conv_weight is not None:
        side = conv_weight.shape[-1] // 2 * 2 + 1  # odd
        shapes["conv_weight"] = (conv_weight, (heads, 1, side, side))
    for name, (parameter, wanted) in shapes.items():
        if tuple(parameter.shape) != wanted:
            raise ValueError(
                f"q has {heads} heads of {channels} channels and {name} is {tuple(parameter.shape)}; allowed: {wanted}"
            )
