"""Double backward is right for every mechanism, option, padding and length.

Second derivatives in one direction are compared with finite differences of first derivatives, computed separately.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.common.contract.mechanisms import (
    COUNT,
    DEFAULTS,
    PATHS,
    PLAIN,
    Case,
    both,
    cases,
    leaves,
    run_in_parts,
    tensors,
    without,
)
from tests.common.inputs import padding
from tests.compare import assert_all_close, assert_close

#: More than one and more than ten chunks of ``COUNT`` tokens, the latter also more than a chunk of 65; no multiples.
LENGTHS = (COUNT + 2, 67)
#: Step of the finite differences: smaller steps lose precision, larger ones cross more kinks of relu.
STEP = 1e-7


@pytest.fixture(autouse=True)
def kernels_with_second_derivatives():
    """Use torch's softmax attention with second derivatives; another test shows that the fused kernel has none."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def mixed(n: int) -> Tensor:
    """Bool (4, n), True = padding: none, on the left, on the right, and the whole row."""
    mask = torch.stack([padding(side, 4, n)[1] for side in ("left", "left", "right", "right")])
    mask[0], mask[3] = False, True
    return mask


def directions(like: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in like]


def slope(out: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    """The derivative of a fixed function of ``out`` in a fixed direction of ``wanted``, as part of the graph."""
    loss = (out * directions([out], 5)[0]).sum() + out.square().sum() / 2
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss, wanted, **options)
    return sum((grad * x).sum() for grad, x in zip(grads, directions(wanted, 6)))


def second(out: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of ``slope``; zeros for tensors that it does not depend on."""
    first = slope(out, wanted)
    return torch.autograd.grad(first + 0 * wanted[-1].sum(), wanted, allow_unused=True, materialize_grads=True)


def assert_is_difference(call: Callable[[], Tensor], wanted: Sequence[Tensor]) -> None:
    """Compare ``second`` of ``call()`` in one direction with the change of ``slope`` along it."""
    direction = directions(wanted, 7)
    actual = sum((x * y).sum() for x, y in zip(second(call(), wanted), direction))

    def slope_after(steps: int) -> Tensor:
        with torch.no_grad():
            for x, change in zip(wanted, direction):
                x.add_(change, alpha=steps * STEP)
        return slope(call(), wanted).detach()

    expected = (slope_after(1) - slope_after(-2)) / (2 * STEP)
    assert_close("second derivative", actual, expected, 1e-4, floor=1.0)


@cases(case for case in PATHS if "differences" not in without(case.name))
def test_they_are_the_differences_of_first_derivatives(case):
    """Default options with both lengths, padded or not; other options with the longer length and padding."""
    assert_differences(case, LENGTHS[1], True)
    if case.label == "default":
        for n in LENGTHS:
            assert_differences(case, n, False)


def assert_differences(case: Case, n: int, padded: bool) -> None:
    module = case.build(max_tokens=max(LENGTHS))
    inputs, masks = tensors(module, n, batch=4), both(mixed(n) if padded else None)
    assert_is_difference(lambda: module(**inputs, **masks), list(leaves(inputs, module).values()))


def assert_second_close(out: Tensor, expected: Tensor, names: dict[str, Tensor]) -> None:
    wanted = list(names.values())
    assert_all_close(names, second(out, wanted), second(expected, wanted), 1e-7)


@cases(case for case in PATHS if "differences" in without(case.name))
def test_gradients_that_are_no_derivatives_have_those_of_the_literal_formula(case):
    module, mask = case.build(), mixed(13)
    inputs = tensors(module, 13, batch=4)
    names = leaves(inputs, module)
    assert_second_close(module(**inputs, **both(mask)), module.reference(**inputs, **both(mask)), names)


@cases(DEFAULTS, causal=True)
def test_sequences_in_parts(case: Case):
    """Steps of one token, chunks, and states of only padding have separate code."""
    module, mask = case.build(), mixed(12)
    inputs = tensors(module, 12, batch=4)
    out, _ = run_in_parts(module, inputs, (1, 2, 8, 1), mask)
    assert_second_close(out, module(**inputs, **both(mask)), leaves(inputs, module))


@cases(case for case in PLAIN if not case.kind.linear_cost and "differences" not in without(case.name))
def test_more_tokens_than_a_block_of_quadratic_attention(case: Case):
    """Blocks are recomputed in the backward pass, which must not depend on the length."""
    n = 257
    module = case.build(max_tokens=n)
    inputs = tensors(module, n, batch=1)
    assert_is_difference(lambda: module(**inputs), list(leaves(inputs, module).values()))


@cases(case for case in PLAIN if case.name in ("gated_delta", "gla"))
def test_operators_of_a_graph_that_autograd_does_not_trace(case: Case):
    """torch.compile with a backend that runs the graph unchanged; others refuse second derivatives themselves."""
    torch._dynamo.reset()
    module = case.build()
    inputs = tensors(module, 7)
    out = torch.compile(module, backend="eager", fullgraph=True)(**inputs)
    assert_second_close(out, module(**inputs), leaves(inputs, module))


@cases(case for case in PLAIN if "second_order" in without(case.name))
def test_a_kernel_without_them_says_so(case: Case):
    module = case.build()
    inputs = tensors(module, 7)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="derivative .* not implemented"):
        second(module(**inputs), list(leaves(inputs, module).values()))
