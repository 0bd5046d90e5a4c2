"""How tests compare tensors: relative root mean square error, one table of tolerances, NaN refused."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from common.modules.stored_options import is_extra_state

#: Largest accepted ||actual - expected|| / ||expected||, by the coarser dtype of the two.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def assert_close(
    name: str, actual: Tensor, expected: Tensor, tolerance: float | None = None, floor: float = 0.0
) -> None:
    """Check that shapes agree, all values are finite and the relative RMS error is within tolerance; names the tensor.

    The error is relative to the norm of ``expected``, or to ``floor`` if that is larger.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    assert torch.isfinite(expected).all(), f"{name}: the expected value is not finite"
    if tolerance is None:
        tolerance = max(TOLERANCES[actual.dtype], TOLERANCES[expected.dtype])
    difference = (actual.double() - expected.double()).norm().item()
    size = max(expected.double().norm().item(), floor)
    error = difference / size if size > 0.0 else difference
    assert error <= tolerance, f"{name}: relative error {error:.3g}, allowed {tolerance:.3g}"


def gradients(out: Tensor, inputs: Iterable[Tensor], seed: int = 0, retain_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients of a fixed random projection of ``out``; 0 for ``inputs`` that it does not depend on."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": retain_graph}
    return torch.autograd.grad((out * weights).sum(), list(inputs), **options)


def assert_gradients_close(
    out: Tensor, expected: Tensor, inputs: Mapping[str, Tensor], tolerance: float | None = None
) -> None:
    """``assert_close`` for the gradients of ``inputs``, by name, through ``out`` and through ``expected``."""
    assert_all_close(inputs, gradients(out, inputs.values()), gradients(expected, inputs.values()), tolerance)


def assert_all_close(
    names: Iterable[str], actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float | None = None
) -> None:
    """``assert_close`` for each pair; a tensor below 0.001 of the total norm is compared relative to that: it may be
    only rounding.
    """
    actual, expected = list(actual), list(expected)
    floor = 1e-3 * sum(x.double().norm().item() ** 2 for x in expected) ** 0.5
    for name, tensor, other in zip(names, actual, expected, strict=True):
        assert_close(f"gradient of {name}", tensor, other, tolerance, floor)


def on_cpu(build: Callable[[], nn.Module]) -> nn.Module:
    """A model that was built on "meta", with memory that holds anything, as sharded training makes it."""
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(1e9)
    return model


def assert_drawn_alike(actual: nn.Module, expected: nn.Module) -> None:
    """Check that parameters and buffers that are constant are equal, and others have nearly the same distribution."""
    drawn, others = (dict([*x.named_parameters(), *x.named_buffers()]) for x in (actual, expected))
    assert drawn.keys() == others.keys()
    for name, x in drawn.items():
        x, other = x.detach().double(), others[name].detach().double()
        assert x.shape == other.shape, name
        if x.numel() < 2 or x.std() == 0 or other.std() == 0:
            assert torch.equal(x, other), name
            continue
        if x.numel() < 16:  # too few for a deviation
            assert x.abs().max() < 100 * other.abs().max(), name
            continue
        error, deviation = 8 / math.sqrt(x.numel()), other.std()
        assert 1 / (1 + error) < x.std() / deviation < 1 + error, name
        assert abs(x.mean() - other.mean()) < error * deviation, name


def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict, without the records of options."""
    return {name: tensor for name, tensor in state.items() if not is_extra_state(name)}
