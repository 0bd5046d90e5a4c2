"""Time and memory grow as declared: in proportion to the tokens if the cost is linear.

The tests count the elements of all created tensors, which does not depend on the machine.
"""

import pytest
import torch

from tests.common.contract.mechanisms import DEFAULTS, at, both, cases, is_linear, leaves, tensors
from tests.common.properties import Elements, bytes_kept, largest_tensor
from tests.compare import gradients

linear = [case for case in DEFAULTS if is_linear(case.kind)]
masked = pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])


def step(case, n: int, masked: bool):
    """A training step on one row, as a function without arguments."""
    module = case.build(torch.float32, max_tokens=n)
    inputs = tensors(module, n, batch=1, dtype=torch.float32)
    mask = (torch.arange(n) < n // 3)[None] if masked else None
    return lambda: gradients(module(**inputs, **both(mask)), leaves(inputs, module).values())


def elements(call) -> int:
    with Elements() as counted:
        call()
    return counted.total


@cases(linear)
@masked
def test_a_training_step_is_linear_in_the_tokens(masked, case):
    half, whole = (elements(step(case, n, masked)) for n in (480, 960))
    assert whole <= 2.05 * half
    assert largest_tensor(step(case, 960, masked)) < 960 * 960 / 4


@cases(linear)
def test_what_is_kept_for_the_backward_pass_is_linear_in_the_tokens(case):
    def kept(n: int) -> int:
        module = case.build(torch.float32, max_tokens=n)
        return bytes_kept(lambda: module(**tensors(module, n, batch=1, dtype=torch.float32)))

    assert kept(2048) <= 2.05 * kept(1024)


@cases(case for case in linear if case.causal)
@torch.no_grad()
def test_a_step_of_decoding_costs_the_same_after_any_number_of_tokens(case):
    """Steps at the same position in a chunk, of 5 tokens here or a power of two, since the visible part varies."""
    module = case.build(torch.float32, max_tokens=900)
    inputs = tensors(module, 900, batch=1, dtype=torch.float32, grad=False)
    costs = []
    for before in (250, 890):
        _, state = module.extend(**at(inputs, slice(0, before)))
        with Elements() as counted:
            module.extend(**at(inputs, slice(before, before + 1)), state=state)
        costs.append(counted.total)
    assert costs[0] == costs[1]
