"""Tiles of features inside a kernel: φ, its derivative, and scores, which are exact enough for flows."""

import triton
import triton.language as tl


@triton.jit
def load_features(x, stride, rows, channels, keep, d: tl.constexpr, phi: tl.constexpr):
    """phi(x) of a tile (C, D) in float32, zero where not ``keep`` and beyond d channels."""
    inside = keep[:, None] & (channels < d)[None, :]
    x = tl.load(x + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    if phi == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif phi == "elu+1":
        x = tl.where(x > 0.0, x + 1.0, tl.exp(x))
    else:
        x = tl.where(x < 0.0, 0.0, x) + 1e-6  # not maximum, which need not hand on a NaN
    return tl.where(inside, x, 0.0)


@triton.jit
def feature_slope(features, phi: tl.constexpr):
    """The derivative of phi, from ``features`` = phi(x)."""
    if phi == "sigmoid":
        return features * (1.0 - features)
    elif phi == "elu+1":
        return tl.where(features > 1.0, 1.0, features)
    else:
        return tl.where(features > 1e-6, 1.0, 0.0)


@triton.jit
def feature_scores(q, k, qn, kn, rows, real, d: tl.constexpr, phi: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """φ(q) φ(k)ᵀ of a tile, a few channels at a time: float32 operands take many registers."""
    dtype: tl.constexpr = q.dtype.element_ty
    scores = tl.zeros((C, C), tl.float32)
    for start in range(0, D, 16):
        channels = start + tl.arange(0, 16)
        phi_q = load_features(q, qn, rows, channels, real, d, phi)
        phi_k = load_features(k, kn, rows, channels, real, d, phi)
        scores += _flow_product(phi_q, tl.trans(phi_k), dtype)
    return scores


@triton.jit
def _flow_product(a, b, dtype: tl.constexpr):
    """a b of float32 operands: exact for a kernel of float32, else with TF32's 10 bits, never fewer."""
    if dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, input_precision="tf32")
