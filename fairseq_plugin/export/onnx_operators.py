"""Operators of torch that ONNX lacks, or has with less precision, composed of operators that it has.

Sizes are known when a graph is built.
"""

from collections.abc import Callable

import torch
from torch import Tensor

#: The most rows of a triangular matrix that are inverted by powers; with more, cancellation would lose precision.
_ROWS = 8


def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``torch.cummax`` by doubling: running maxima and the last index of each; O(n log n)."""
    values = _running_max(x, dim)
    indices = torch.arange(x.shape[dim], device=x.device).view(
        [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    )
    return values, _running_max(torch.where(x == values, indices, -1), dim)


def _running_max(x: Tensor, dim: int) -> Tensor:
    length, shift = x.shape[dim], 1
    while shift < length:
        head, tail = x.narrow(dim, 0, shift), x.narrow(dim, shift, length - shift)
        x = torch.cat([head, torch.maximum(tail, x.narrow(dim, 0, length - shift))], dim)
        shift *= 2
    return x


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """``torch.linalg.solve_triangular`` for a (..., n, n), lower with a unit diagonal, and b (..., n, m), by halves.

    Raises:
        ValueError: another kind of matrix, which no mechanism needs.
    """
    if upper or not left or not unitriangular:
        raise ValueError("upper, left or unitriangular is given otherwise; allowed: False, True, True")
    return _solved(a, b)


def _solved(a: Tensor, b: Tensor) -> Tensor:
    rows = a.shape[-1]
    if rows > _ROWS:
        half = rows // 2
        first = _solved(a[..., :half, :half], b[..., :half, :])
        second = _solved(a[..., half:, half:], b[..., half:, :] - a[..., half:, :half] @ first)
        return torch.cat([first, second], dim=-2)
    power, reached = -a.tril(-1), 1  # (1 + N)^-1 = (1 - N) (1 + N^2) (1 + N^4) ..., since N^n is 0
    while reached < rows:
        b = b + power @ b
        power, reached = power @ power, 2 * reached
    return b


def in_double(operator: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``operator`` for float32, computed in float64.

    onnxruntime's exp is biased in float32. A state that is a logarithm passes through it at every step: after 3,000
    steps, Flow-Attention's logits had an error of 1.6e-4 (2026-11-24).
    """

    def exactly(x: Tensor) -> Tensor:
        return operator(x.double()).to(x.dtype) if x.dtype == torch.float32 else NotImplemented

    return exactly


#: The operators that are replaced in programs of ``torch.export``.
DECOMPOSITIONS = {
    torch.ops.aten.exp.default: in_double(torch.exp),
    torch.ops.aten.log.default: in_double(torch.log),
    torch.ops.aten.cummax.default: cummax,
    torch.ops.aten.linalg_solve_triangular.default: solve_triangular,
}
