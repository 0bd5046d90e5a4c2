"""The one way tests compare tensors: relative root mean square error, one table of tolerances, NaN refused."""

from typing import Dict, Iterable, Optional, Tuple

import torch
from torch import Tensor

#: Largest accepted ||actual - expected|| / ||expected||, by the coarser dtype of the two.
TOLERANCES: Dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: Optional[float] = None) -> None:
    """Fail, naming the tensor, unless shapes agree, all is finite and the relative RMS error is within tolerance."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    assert torch.isfinite(expected).all(), f"{name}: the expected value is not finite"
    if tolerance is None:
        tolerance = max(TOLERANCES[actual.dtype], TOLERANCES[expected.dtype])
    difference, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    error = difference / size if size > 0.0 else difference
    assert error <= tolerance, f"{name}: relative error {error:.3g}, allowed {tolerance:.3g}"


def gradients(out: Tensor, inputs: Iterable[Tensor], seed: int = 0) -> Tuple[Tensor, ...]:
    """Gradients of a fixed random projection of ``out`` with respect to ``inputs``."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), list(inputs))
