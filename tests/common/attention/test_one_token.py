"""Decoding remembers what it asked of tensors of one kind, and asks again of others, and in other surroundings."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from common.attention import ATTENTIONS, InnerAttention
from common.ops.shared.cpu import dispatch, threads
from tests.common.contract.mechanisms import Case, tensors
from tests.compare import assert_close

pytest.importorskip("numba")

NAMES = [name for name, kind in ATTENTIONS.items() if hasattr(kind.op, "step")]
Tensors = dict[str, Tensor]


def build(name: str) -> InnerAttention:
    return Case(name, True).build(torch.float32)


def token(module: InnerAttention, seed: int) -> Tensors:
    return tensors(module, 1, dtype=torch.float32, seed=seed, grad=False)


@torch.no_grad()
def state_of(module: InnerAttention) -> Tensors:
    """The state after three tokens, of which the last ones are of a known kind."""
    state = None
    for seed in range(3):
        _, state = module.extend(**token(module, seed), state=state)
    return state


def next_tokens(module: InnerAttention, inputs: Tensors, state: Tensors) -> Tensors:
    first, state = module.extend(**inputs, state=state)
    second, state = module.extend(**inputs, state=state)
    return {"first": first, "second": second, **state}


def outcome(run: Callable, *arguments: Any) -> Any:
    """The result of ``run``, or its error."""
    try:
        return run(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Marked(Tensor):
    """A tensor of another class."""


class Change(NamedTuple):
    """What is different from the tokens so far."""

    context: Callable[[], AbstractContextManager] = nullcontext
    input: Callable[[Tensor], Tensor] = Tensor.clone
    state: Callable[[Tensor], Tensor] = Tensor.clone
    module: Callable[[nn.Module], nn.Module] = nn.Module.eval


def switch(value: str) -> Callable[[], AbstractContextManager]:
    return lambda: mock.patch.dict(os.environ, {dispatch.VARIABLE: value})


CHANGES = {
    "nothing": Change(),
    "inference mode": Change(torch.inference_mode),
    "kernels off": Change(switch("0")),
    "a wrong switch": Change(switch("2")),
    "autocast": Change(lambda: torch.autocast("cpu", torch.bfloat16)),
    "double precision": Change(input=Tensor.double),
    "half precision": Change(input=Tensor.half),
    "another class": Change(input=lambda x: x.as_subclass(Marked)),
    "negated memory": Change(input=lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag),
    "another layout": Change(input=lambda x: x.transpose(-2, -1).contiguous().transpose(-2, -1).flip(-1).flip(-1)),
    "another batch": Change(input=lambda x: x[:1], state=lambda x: x[:1]),
    "another batch than the state": Change(input=lambda x: x[:1]),
    "a state of half precision": Change(state=Tensor.half),
    "a state that is too wide": Change(state=lambda x: torch.cat([x, x], dim=-1)),
    "a device as a context": Change(lambda: torch.device("cpu")),
    "weights of another dtype": Change(module=nn.Module.double),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_the_next_tokens_are_as_for_a_module_that_remembers_nothing(name, change, monkeypatch):
    """Results, errors, and whether kernels are used."""
    calls, run = [], threads.run
    monkeypatch.setattr(threads, "run", lambda *arguments: (calls.append(None), run(*arguments)))
    context, of_input, of_state, of_module = CHANGES[change]
    used, outcomes = [], []
    for module in (build(name), build(name)):
        state = state_of(build(name) if outcomes else module)
        module = of_module(module)
        inputs = {key: of_input(x) for key, x in token(module, 9).items()}
        state = {key: of_state(x) for key, x in state.items()}
        calls.clear()
        with torch.no_grad(), context():
            outcomes.append(outcome(next_tokens, module, inputs, state))
        used.append(len(calls))
    actual, expected = outcomes
    assert used[0] == used[1]
    if isinstance(expected, str):
        assert actual == expected
        return
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        assert (type(actual[key]), actual[key].dtype, actual[key].requires_grad) == (type(x), x.dtype, x.requires_grad)
        assert_close(key, actual[key].double(), x.double(), 1e-2 if change == "autocast" else 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_tangents_maps_and_counts_are_as_without_a_known_kind(name):
    module, fresh = build(name), build(name)
    state, inputs = state_of(module), token(module, 9)
    given = list(inputs.values())

    def out(module: InnerAttention, *tensors: Tensor) -> Tensor:
        return module.extend(**dict(zip(inputs, tensors)), state=state)[0]

    def gradient(module: InnerAttention) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in given]
        with torch.enable_grad():
            return torch.autograd.grad(out(module, *leaves).square().sum(), leaves[2])[0]

    def tangent(module: InnerAttention) -> Tensor:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in given]
            return forward_ad.unpack_dual(out(module, *duals)).tangent

    def mapped(module: InnerAttention) -> Tensor:
        # Inside, tensors have the shapes of the known kind. The state is not mapped.
        return torch.func.vmap(partial(out, module))(*(torch.stack([x, -x]) for x in given))

    def flops(module: InnerAttention) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            out(module, *given)
        return torch.tensor(counter.get_total_flops())

    def fake(module: InnerAttention) -> torch.Size:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return out(module, *given).shape

    with torch.no_grad():
        assert outcome(fake, module) == outcome(fake, fresh)  # an error where a count is compared with a length
        for run in (gradient, tangent, mapped, flops):
            assert_close(run.__name__, run(module).double(), run(fresh).double(), 1e-5)


@torch.no_grad()
def test_a_subclass_with_another_function_has_no_step_of_its_parent():
    class Doubled(ATTENTIONS["linear"]):
        """Twice linear attention."""

        def apply_op(self, *tensors: Tensor, **arguments: Any) -> Any:
            out, state = super().apply_op(*tensors, **arguments)
            return 2 * out, state

    module = Doubled(True)
    inputs, state = token(module, 9), state_of(module)
    expected = build("linear").extend(**inputs, state=state)[0]
    assert_close("out", module.extend(**inputs, state=state)[0], 2 * expected)
