"""Tiles of tokens and channels inside a kernel: reading, writing, and products on the matrix units.

``README.md`` next to this file bounds the errors of the products.
"""

import triton
import triton.language as tl

from .launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def load_tile(x, stride, rows, channels, keep, size: tl.constexpr):
    """A tile of x in its dtype, zero where not ``keep`` and beyond ``size`` channels."""
    inside = keep[:, None] & (channels < size)[None, :]
    return tl.load(x + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(x, stride, rows, channels, keep, size: tl.constexpr, values):
    """Write ``values`` as a tile of x in its dtype, but where not ``keep`` and beyond ``size`` channels."""
    inside = keep[:, None] & (channels < size)[None, :]
    if x.dtype.element_ty == tl.bfloat16:
        values = _bfloat16(values)
    tl.store(x + rows[:, None] * stride + channels[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(x, channels, columns, d: tl.constexpr, e: tl.constexpr):
    """A block (D, E) of x (d, e), zero beyond it."""
    inside = (channels < d)[:, None] & (columns < e)[None, :]
    return tl.load(x + channels[:, None] * e + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_matrix(x, channels, columns, d: tl.constexpr, e: tl.constexpr, values):
    """Write a block (D, E) of x (d, e), but what is beyond it."""
    inside = (channels < d)[:, None] & (columns < e)[None, :]
    tl.store(x + channels[:, None] * e + columns[None, :], values, mask=inside)


@triton.jit
def product(a, b, total, dtype: tl.constexpr):
    """``total`` + a b, summed in float32, of operands that are rounded to ``dtype``, the kernel's own.

    In float16 a rounded operand is scaled to its largest number, so that none overflows or vanishes.
    """
    if dtype == tl.float32:
        total = tl.dot(a, b, total, input_precision="tf32x3")
    elif dtype == tl.bfloat16:
        total = tl.dot(_bfloat16(a), _bfloat16(b), total)
    else:
        scale_a, scale_b = _float16_scale(a), _float16_scale(b)
        total += tl.dot(_float16(a, scale_a), _float16(b, scale_b)) * scale_a * scale_b
    return total


@triton.jit
def _bfloat16(x):
    """x rounded; as float32 in the interpreter, which cuts bits off in place of rounding and multiplies bits."""
    if _INTERPRETED:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _float16_scale(x):
    """Number that x is divided by to become float16; 1 for a tile that is float16 already."""
    if x.dtype == tl.float16:
        return 1.0
    else:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
        return tl.where(largest > 1e-30, largest, 1.0) / 16384.0  # far below float16's 65504, far above its 6e-5


@triton.jit
def _float16(x, scale):
    if x.dtype == tl.float16:
        return x
    else:
        return (x / scale).to(tl.float16)
