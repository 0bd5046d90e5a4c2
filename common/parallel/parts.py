"""Cutting a batch of sequences into the parts of a group's processes."""

from torch import Tensor
from torch.nn import functional as F

from ..ops.shared.checks import check_positive_int


def part_length(tokens: int, parts: int, multiple: int = 1) -> int:
    """Tokens of each of so many ``parts`` of a sequence: the same of all, so that the last may end in padding.

    A multiple of ``multiple``, the chunk that a mechanism treats as one, where the parts are that long.
    """
    for name, value in (("tokens", tokens), ("parts", parts), ("multiple", multiple)):
        check_positive_int(name, value)
    length = -(-tokens // parts)
    return length if length < multiple else -(-length // multiple) * multiple


def own_part(x: Tensor, rank: int, length: int, padding: int | float | bool, dim: int = 1) -> Tensor:
    """Tokens ``rank`` x ``length`` and after of x along ``dim``, ``length`` of them; after the last, ``padding``."""
    start = min(rank * length, x.shape[dim])
    part = x.narrow(dim, start, min(length, x.shape[dim] - start))
    missing = length - part.shape[dim]
    if not missing:
        return part.contiguous()
    return F.pad(part, [0, 0] * (x.dim() - 1 - dim) + [0, missing], value=padding).contiguous()
