"""Adding the dimension of heads to inputs that come without one."""

from torch import Tensor


def with_heads(names: tuple[str, ...], tensors: tuple[Tensor, ...], without_heads: bool) -> tuple[Tensor, ...]:
    """(B, n, c) -> (B, 1, n, c) for tensors ``without_heads``; ValueError unless all or none have the dimension."""
    allowed = 3 if without_heads else 4
    for name, tensor in zip(names, tensors):
        if not isinstance(tensor, Tensor) or tensor.dim() != allowed:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {shape}; allowed: a tensor of {allowed} dimensions, as {names[0]} is")
    return tuple(x.unsqueeze(1) for x in tensors) if without_heads else tensors
