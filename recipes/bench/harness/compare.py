"""Compare a candidate with its reference: outputs and gradients, by relative root mean square error."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .work import Comparison

#: Allowed ||actual - expected|| / ||expected|| of one operation, which sums over up to ten thousands of tokens.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
#: The allowed error of a model, whose gradients go through many operations.
MODEL_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def compare(tensor: str, actual: Tensor, expected: Tensor, allowed: float) -> Comparison:
    """Compare two tensors in float64; one that is not finite or has another shape is infinitely far off."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return Comparison(tensor, math.inf, allowed)
    size = expected.double().norm().item()
    difference = (actual.double() - expected.double()).norm().item()
    return Comparison(tensor, difference / size if size > 0.0 else difference, allowed)


def first_unequal(comparisons: Iterable[Comparison]) -> Comparison | None:
    """The first comparison whose error exceeds what is allowed, or is NaN; None if all are equal.

    Raises:
        ValueError: nothing was compared.
    """
    comparisons = list(comparisons)
    if not comparisons:
        raise ValueError("nothing was compared; allowed: at least one tensor of a candidate and its reference")
    return next((comparison for comparison in comparisons if not comparison.error <= comparison.allowed), None)


def compare_attention(
    attention: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    heads: int | None = None,
    allowed: float | None = None,
) -> list[Comparison]:
    """Compare the output and every gradient of ``attention(*inputs)`` with ``reference``, which gets float64.

    ``heads``: compute the reference only for this many last heads, dimension 1 of every tensor. ``attention`` gets all
    heads; since they are independent, its outputs and gradients for the last ones are compared.
    """
    allowed = TOLERANCES[inputs[0].dtype] if allowed is None else allowed
    out = attention(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, inputs, weights, materialize_grads=True)

    def part(x: Tensor) -> Tensor:
        return x.detach() if heads is None else x.detach()[:, -heads:]

    doubles = [part(x).double().requires_grad_() for x in inputs]
    expected = reference(*doubles)
    expected_gradients = torch.autograd.grad(expected, doubles, part(weights).double(), materialize_grads=True)
    comparisons = [compare("output", part(out), expected.detach(), allowed)]
    for name, actual, expected_gradient in zip(names, gradients, expected_gradients, strict=True):
        comparisons.append(compare(f"gradient of {name}", part(actual), expected_gradient, allowed))
    return comparisons
