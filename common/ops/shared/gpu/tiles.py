"""Reading and writing tiles of tokens and channels inside a kernel, in float32 whatever the tensor's dtype."""

import triton
import triton.language as tl


@triton.jit
def load_tile(x, stride, rows, channels, keep, size: tl.constexpr):
    """A tile of x in float32, zero where not ``keep`` and beyond ``size`` channels."""
    inside = keep[:, None] & (channels < size)[None, :]
    return tl.load(x + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, stride, rows, channels, keep, size: tl.constexpr, values):
    """Write ``values`` as a tile of x in its dtype, but where not ``keep`` and beyond ``size`` channels."""
    inside = keep[:, None] & (channels < size)[None, :]
    tl.store(x + rows[:, None] * stride + channels[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(x, channels, columns, d: tl.constexpr, e: tl.constexpr):
    """A block (D, E) of x (d, e), zero beyond it."""
    inside = (channels < d)[:, None] & (columns < e)[None, :]
    return tl.load(x + channels[:, None] * e + columns[None, :], mask=inside, other=0.0)
