"""Splitting a batch of sequences into parts for the processes of a group."""

from torch import Tensor
from torch.nn import functional as F

from ..ops.shared.checks import check_positive_int


def part_length(tokens: int, parts: int, multiple: int = 1) -> int:
    """Number of tokens in each of ``parts`` parts of a sequence: equal for all, so the last may end in padding.

    It is rounded up to a multiple of ``multiple``, such as a mechanism's chunk size, unless parts are shorter than
    that.
    """
    for name, value in (("tokens", tokens), ("parts", parts), ("multiple", multiple)):
        check_positive_int(name, value)
    length = -(-tokens // parts)
    return length if length < multiple else -(-length // multiple) * multiple


def own_part(x: Tensor, rank: int, length: int, padding: int | float | bool, dim: int = 1) -> Tensor:
    """The ``length`` tokens of x along ``dim`` from ``rank`` x ``length`` on, filled up with ``padding``."""
    start = min(rank * length, x.shape[dim])
    part = x.narrow(dim, start, min(length, x.shape[dim] - start))
    missing = length - part.shape[dim]
    if not missing:
        return part.contiguous()
    return F.pad(part, [0, 0] * (x.dim() - 1 - dim) + [0, missing], value=padding).contiguous()
