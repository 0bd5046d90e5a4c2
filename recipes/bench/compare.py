"""Comparing a form with its reference: outputs and gradients, by relative root mean square error."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .work import Comparison

#: Allowed ||actual - expected|| / ||expected|| of one operation. float32 has sums over ten thousands of tokens in it.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
#: A model is many operations after one another, and its gradients go through all of them.
MODEL_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def compare(tensor: str, actual: Tensor, expected: Tensor, allowed: float) -> Comparison:
    """``actual`` beside ``expected``, in float64; what is not finite, or has another shape, is infinitely far off."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return Comparison(tensor, math.inf, allowed)
    size = expected.double().norm().item()
    difference = (actual.double() - expected.double()).norm().item()
    return Comparison(tensor, difference / size if size > 0.0 else difference, allowed)


def first_unequal(found: Iterable[Comparison]) -> Comparison | None:
    """The first that is further off than allowed, NaN included; None if all are equal.

    Raises:
        ValueError: nothing was compared.
    """
    found = list(found)
    if not found:
        raise ValueError("nothing was compared; allowed: at least one tensor of a form and its reference")
    return next((one for one in found if not one.error <= one.allowed), None)


def compare_attention(
    form: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    heads: int | None = None,
    allowed: float | None = None,
) -> list[Comparison]:
    """The output and every gradient of ``form(*inputs)`` beside ``reference``, which is given float64.

    ``heads``: the reference runs on so many of the last heads alone, dimension 1 of every tensor. The form runs on all
    of them; heads do not touch one another, so that theirs are its outputs and gradients of these.
    """
    allowed = TOLERANCES[inputs[0].dtype] if allowed is None else allowed
    out = form(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, inputs, weights)

    def part(x: Tensor) -> Tensor:
        return x.detach() if heads is None else x.detach()[:, -heads:]

    doubles = [part(x).double().requires_grad_() for x in inputs]
    expected = reference(*doubles)
    expected_gradients = torch.autograd.grad(expected, doubles, part(weights).double())
    found = [compare("output", part(out), expected.detach(), allowed)]
    for name, actual, wanted in zip(names, gradients, expected_gradients, strict=True):
        found.append(compare(f"gradient of {name}", part(actual), wanted, allowed))
    return found
