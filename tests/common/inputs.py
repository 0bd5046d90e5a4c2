"""Random tensors, padding masks and options for the tests of the core."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def qkv(
    n: int,
    m: int | None = None,
    *,
    batch: int = 2,
    heads: int = 2,
    d: int = 5,
    e: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e): leaves that require gradients; m is n when None."""
    generator = torch.Generator().manual_seed(seed)
    m = n if m is None else m
    shapes = ((batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, e))
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v = ((x * scale).to(dtype).requires_grad_() for x in tensors)
    return q, k, v


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Context manager: memory that torch.empty returns holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def mixed_chunk_inputs(
    n: int,
    *,
    batch: int = 2,
    heads: int | None = 2,
    s: int = 4,
    e: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
) -> tuple[Tensor, ...]:
    """q_quad, k_quad, q_lin, k_lin (B, H, n, s) and v (B, H, n, e), leaves; (B, n, s) and (B, n, e) for None heads."""
    generator = torch.Generator().manual_seed(seed)
    leading = (batch,) if heads is None else (batch, heads)
    tensors = (torch.randn(*leading, n, size, generator=generator, dtype=torch.float64) for size in (s, s, s, s, e))
    return tuple((x * scale).to(dtype).requires_grad_() for x in tensors)


#: Forms of a relative bias, by name; see ``bias_like``.
BIASES = ("no bias", "vector", "matrix", "vectors", "matrices")


def bias_like(form: str, tokens: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """A bias for ``tokens`` tokens, a leaf: over distances or a matrix, for all heads or (plural) one per head."""
    if form == "no bias":
        return None
    shape = (2 * tokens - 1,) if form.startswith("vector") else (tokens, tokens)
    shape = (heads, *shape) if form in ("vectors", "matrices") else shape
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def doubled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy the numbers to new float64 leaves, for the reference of a less precise input."""
    return tuple(x.detach().double().requires_grad_() for x in tensors)


#: Sides on which padding can be; see ``padding``.
SIDES = ("none", "left", "right", "both", "holes", "all")


def padding(side: str, batch: int, tokens: int) -> Tensor | None:
    """Bool (batch, tokens), True = padding, with a different amount in each row; "all" masks one row completely."""
    if side == "none":
        return None
    position = torch.arange(tokens).expand(batch, tokens)
    amount = (torch.arange(batch)[:, None] + 1) * tokens // (2 * batch + 2)
    if side == "left":
        return position < amount
    if side == "right":
        return position >= tokens - amount
    if side == "both":
        return (position < amount // 2) | (position >= tokens - (amount + 1) // 2)
    if side == "holes":
        return (position + torch.arange(batch)[:, None]) % 3 == 1
    mask = position >= tokens - amount
    mask[0] = True
    return mask


#: Options of Flow-Attention: each differs from the defaults in one option, and one differs in all of them.
FLOW_OPTIONS = [
    {},
    {"form": "paper"},
    {"form": "released_vision"},
    {"clamp": 0.9},
    {"clamp": 5.0},
    {"clamp": None},
    {"phi": "elu+1"},
    {"phi": "relu"},
    {"competition": "sigmoid"},
    {"competition": "none"},
    {"allocation": "softmax"},
    {"allocation": "none"},
    {"form": "paper", "phi": "elu+1", "competition": "sigmoid", "allocation": "softmax"},
    {"form": "paper", "competition": "none", "allocation": "none"},
    {"form": "released_vision", "phi": "elu+1", "clamp": None, "allocation": "softmax"},
]


def name_of(options: dict) -> str:
    """The options as a test label."""
    return ",".join(f"{key}={value}" for key, value in options.items()) or "defaults"
