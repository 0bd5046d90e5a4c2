"""Learned feature maps of each head: a matrix followed by relu, or by a softmax of its output and of the negative.

Legend: B batch, H heads, n tokens, d channels of a query or key, r rows of the matrix, f features.
"""

import torch
from torch import Tensor

from .checks import shape_of
from .padding import zero_padding
from .precision import compute_dtype, in_dtype

#: relu(W x + b), f = r; or softmax(W x + b) and softmax(-W x - b), concatenated, f = 2r.
LEARNED_MAPS = ("relu", "softmax")


def number_of_features(weight: Tensor, feature_map: str) -> int:
    """f, for a matrix (H, r, d) of each head."""
    return weight.shape[1] if feature_map == "relu" else 2 * weight.shape[1]


def learned_features(
    x: Tensor, weight: Tensor, bias: Tensor | None, feature_map: str, padding_mask: Tensor | None
) -> Tensor:
    """The features of x (B, H, n, d) by ``weight`` (H, r, d) and ``bias`` (H, r): (B, H, n, f), 0 at padding; O(n r d).

    In float32, or float64 for a float64 x. ``padding_mask`` (B, n), True = padding, is also cleared before the map, so
    that values at padding do not reach a gradient.
    """
    dtype = compute_dtype(x)
    mapped = zero_padding(in_dtype(x, dtype), padding_mask) @ in_dtype(weight, dtype).transpose(1, 2)  # (B, H, n, r)
    if bias is not None:
        mapped = mapped + in_dtype(bias, dtype).unsqueeze(1)
    if feature_map == "relu":
        features = mapped.relu()
    else:
        features = torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], dim=-1)
    return zero_padding(features, padding_mask)


def check_map(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless ``name``_weight (H, r, d) and ``name``_bias, (H, r) or None, are a map of x."""
    fits = isinstance(weight, Tensor) and weight.dim() == 3 and weight.is_floating_point()
    if not fits or (weight.shape[0], weight.shape[2]) != (x.shape[1], x.shape[3]) or weight.shape[1] < 1:
        raise ValueError(
            f"{name}_weight is {shape_of(weight)}; allowed: a tensor ({x.shape[1]}, features, {x.shape[3]})"
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:2]):
        raise ValueError(f"{name}_bias is {shape_of(bias)}; allowed: a tensor {tuple(weight.shape[:2])}, or None")
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}_{what} is on {tensor.device}; allowed: the device of the queries, {x.device}")
