"""Copies of a module compute the same: copied, pickled, in another process, loaded, resumed and drawn anew."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.common.contract.mechanisms import DEFAULTS, PATHS, cases, tensors
from tests.compare import assert_close, assert_drawn_alike, on_cpu
from tests.processes import fork_server

#: Enough passes for every pass counter to wrap around, also when it starts from the middle.
PASSES = 7


@cases(PATHS)
def test_it_is_copied_pickled_and_loaded(case):
    module = case.build()
    inputs = tensors(module, 9)
    expected = module(**inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(**inputs), expected) and repr(other) == repr(module)
    fresh = case.build(std=0.1)
    assert case.label != "default" or not list(module.parameters()) or not torch.equal(fresh(**inputs), expected)
    fresh.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(fresh(**inputs), expected)
    for option, value in case.options.items():
        assert f"{option}={value!r}" in repr(module) or isinstance(value, tuple)


def _outputs(given: list[tuple[torch.nn.Module, dict]]) -> list[Tensor]:
    torch.set_num_threads(1)
    with torch.no_grad():
        return [module(**inputs) for module, inputs in given]


def test_another_process_computes_the_same():
    """Workers get modules and tensors by pickle, and nothing else; one worker for all mechanisms."""
    chosen = [case for case in DEFAULTS if case.kind.__module__.startswith("common.")]
    if not chosen:
        pytest.skip("a user's own file has to be imported in each process")
    modules = [case.build() for case in chosen]
    given = [(module, tensors(module, 9, grad=False)) for module in modules]
    with ProcessPoolExecutor(1, fork_server()) as pool:
        found = pool.submit(_outputs, given).result()
    for case, actual, expected in zip(chosen, found, _outputs(given), strict=True):
        assert_close(str(case), actual, expected, 1e-12)


@cases(case for case in PATHS if not case.rotary)
def test_passes_in_training_go_on_from_the_state_dict(case):
    """All state that a forward pass depends on is in it, or in torch's generator."""
    module, other = case.build().train(), case.build(std=0.1).train()
    inputs = tensors(module, 9, grad=False)
    for _ in range(PASSES):
        module(**inputs)
    other.load_state_dict(module.state_dict())
    outputs = []
    for model in (module, other):
        torch.default_generator.manual_seed(3)
        outputs.append([model(**inputs) for _ in range(PASSES)])
    assert all(torch.equal(*both) for both in zip(*outputs))


@cases(case for case in PATHS if not case.rotary)
def test_reset_parameters_after_those_of_the_parts(case):
    """Hosts draw parameters anew: each gets what the constructor gives it, and so does every buffer."""
    torch.manual_seed(0)
    module = on_cpu(case.new)
    module.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    assert_drawn_alike(module, case.new())
