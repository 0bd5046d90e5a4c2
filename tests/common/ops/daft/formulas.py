"""DAFT with every weight computed explicitly, and tensors for its tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.compare import assert_close, gradients


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers, as a leaf."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def daft_inputs(
    tokens: int, heads: int = 4, *, batch: int = 2, channels: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q (B, T, d), k (B, T, h), v (B, T, d), leaves."""
    sizes = (channels, heads, channels)
    return [normal(batch, tokens, size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]


def assert_agrees(actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance: float = 1e-8) -> None:
    """Compare outputs and the gradients of ``leaves``."""
    assert_close("out", actual, expected)
    for leaf, actual_grad, expected_grad in zip(
        range(len(leaves)), gradients(actual, leaves), gradients(expected, leaves)
    ):
        assert_close(f"gradient of leaf {leaf}", actual_grad, expected_grad, tolerance=tolerance)


def one_hot_filter(index: Tensor, bias: Tensor, window: Sequence[int]) -> Tensor:
    """The filter (h, *window) with ``bias`` at ``index`` of the flattened window and 0 elsewhere."""
    flat = torch.zeros(len(index), int(torch.tensor(window).prod()), dtype=bias.dtype)
    return flat.scatter(1, index[:, None], bias[:, None]).unflatten(1, tuple(window))


def filter_bias(
    r: Tensor, tokens: int, causal: bool, shape: tuple[int, int] | None = None, outside: float = 0.0
) -> Tensor:
    """w (h, T, T) of the filter r (h, window) or (h, kh, kw): row t is added to the keys that token t sees."""
    r = r if r.dim() == 3 else r.unsqueeze(1)
    indices = torch.arange(tokens)
    axes = (torch.zeros_like(indices), indices) if shape is None else (indices // shape[1], indices % shape[1])
    centres = (0 if shape is None else r.shape[1] // 2, r.shape[2] - 1 if causal else r.shape[2] // 2)
    offsets = [x - x[:, None] + centre for x, centre in zip(axes, centres)]  # (T, T) each
    inside = torch.stack([(i >= 0) & (i < size) for i, size in zip(offsets, r.shape[1:])]).all(0)
    down, across = (i.clamp(0, size - 1) for i, size in zip(offsets, r.shape[1:]))
    return r[:, down, across].masked_fill(~inside, outside)


def equation_5(k: Tensor, v: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """k (B, h, 1, T), v (B, h, T, c), w (h, T, T), ``seen`` (T, T) -> (B, h, T, c)."""
    weights = torch.exp(k + w) * seen
    return weights @ v / weights.sum(-1, keepdim=True)


def written_out(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    """DAFT by equation 5: k (B, T, h), q and v (B, T, d), w (h or 1, T, T) -> (B, T, d)."""
    seen = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool)
    values = v.unflatten(2, (k.shape[2], -1)).transpose(1, 2)  # (B, h, T, c)
    out = equation_5(k.transpose(1, 2).unsqueeze(2), values, w, seen.tril() if causal else seen)
    out = out.transpose(1, 2).flatten(2)
    return out if q is None else torch.sigmoid(q) * out


def assert_every_row_is_right(op: Callable[..., Tensor], exact: Callable[..., Tensor], k: Tensor, v: Tensor) -> None:
    """Each row of ``op(k, v)`` alone matches ``exact`` in float64, to 1e-3 and the rounding of the dtype."""
    actual, expected = op(k, v).double(), exact(k.double(), v.double())
    error = (actual - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    assert error.max() <= {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[v.dtype]
