"""Memory inside kernels: rows of tensors by address and strides, and the one function that needs LLVM, ``exp``."""

import math

import numpy as np
from numba import carray, types
from numba.extending import intrinsic, overload

from .compiler import inlined


@intrinsic
def _pointer(context, address, like):
    """The pointer to numbers of the type of ``like`` at ``address``, in bytes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.intp, like), generate


def _size(like):
    """Bytes of a number."""


@overload(_size, inline="always")
def _size_of(like):
    size = like.bitwidth // 8
    return lambda like: size


def number(value, like):
    """``value`` in the type of ``like``; without it, Numba computes with float32 and integers in float64."""


@overload(number, inline="always")
def _number(value, like):
    convert = np.float32 if like == types.float32 else np.float64
    return lambda value, like: convert(value)


@inlined
def array(address, begin, shape, like):
    """The contiguous array of this shape, of the type of ``like``, ``begin`` numbers after ``address``."""
    return carray(_pointer(address + begin * _size(like), like), shape)


@inlined
def row(tensor, b, h, t, size, like):
    """The ``size`` channels of token t of head h of row b: ``tensor`` is its address and its strides (B, H, n)."""
    offset = b * tensor[1] + h * tensor[2] + t * tensor[3]
    return carray(_pointer(tensor[0] + offset * _size(like), like), size)


@intrinsic
def _as_float(context, bits):
    to = {types.int32: types.float32}[bits]

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return to(bits), generate


def exp(x):
    """e to the power of x. Numba's own is called for each number, and this in vectors: 0.2 ns a number."""


@overload(exp)
def _exp(x):
    if x != types.float32:
        return lambda x: math.exp(x)
    log2_e, ln2_high, ln2_low = (np.float32(c) for c in (1.4426950408889634, 0.693359375, -2.12194440e-4))
    c7, c6, c5, c4, c3, c2 = (np.float32(1 / math.factorial(i)) for i in (7, 6, 5, 4, 3, 2))
    lowest, highest, half, one, zero, inf = (np.float32(c) for c in (-87.0, 88.0, 0.5, 1.0, 0.0, np.inf))
    bias, mantissa = np.int32(127), np.int32(23)

    def of_float32(x):
        # x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its series, relative error 1e-7.
        bounded = min(max(x, lowest), highest)
        n = np.float32(np.floor(bounded * log2_e + half))
        r = (bounded - n * ln2_high) - n * ln2_low
        series = ((((((c7 * r + c6) * r + c5) * r + c4) * r + c3) * r + c2) * r + one) * r + one
        power = series * _as_float(np.int32((np.int32(n) + bias) << mantissa))
        power = zero if x < lowest else power
        power = inf if x > highest else power  # early by 0.7: the next power of 2 has no exponent
        return x if x != x else power

    return of_float32
