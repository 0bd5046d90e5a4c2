"""Adds a dimension of heads to inputs without one."""

from torch import Tensor

from .checks import shape_of


def with_heads(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], bool]:
    """(B, n, c) -> (B, 1, n, c) for tensors without heads, and whether they were without heads.

    Raises:
        ValueError: the first tensor has neither 3 nor 4 dimensions, or another does not have as many as the first.
    """
    first = tensors[0]
    without_heads = isinstance(first, Tensor) and first.dim() == 3
    allowed = first.dim() if isinstance(first, Tensor) else 0
    for name, tensor in zip(names, tensors):
        if isinstance(tensor, Tensor) and tensor.dim() == allowed and allowed in (3, 4):
            continue
        fits = "(B, n, s) or (B, H, n, s)" if tensor is first else f"of {allowed} dimensions, as {names[0]} is"
        raise ValueError(f"{name} is {shape_of(tensor)}; allowed: a tensor {fits}")
    return tuple(x.unsqueeze(1) for x in tensors) if without_heads else tensors, without_heads
