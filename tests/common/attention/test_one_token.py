"""Decoding remembers what it asked of tensors of one kind, and asks again of others, and in other surroundings."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from common.attention import ATTENTIONS, InnerAttention, build_attention
from common.ops.shared.cpu import dispatch, threads
from tests.compare import assert_close

pytest.importorskip("numba")

HEADS, CHANNELS = 2, 8
NAMES = [name for name, kind in ATTENTIONS.items() if hasattr(kind.op, "step")]


def build(name: str) -> InnerAttention:
    torch.manual_seed(1)
    facts = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 16}
    return build_attention(name, True, **facts, **({"floor": 0.1} if "rfa" in name else {})).eval()


def token(module: InnerAttention, seed: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    widths = module.projections(CHANNELS)
    tensors = {x: torch.randn(batch, HEADS, 1, widths[x], dtype=dtype) for x in ("q", "k", "v")}
    return {**tensors, **module.inputs(x=torch.randn(batch, 1, HEADS * CHANNELS, dtype=dtype))}


@torch.no_grad()
def state_of(module: InnerAttention, tokens: int = 3) -> dict[str, Tensor]:
    """The state after some tokens, of which the last ones are of a known kind."""
    state = None
    for seed in range(tokens):
        _, state = module.extend(**token(module, seed), state=state)
    return state


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@contextmanager
def no_context() -> Iterator[None]:
    yield


class Marked(Tensor):
    """A tensor of another class."""


def marked(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.as_subclass(Marked) for name, x in inputs.items()}


def negated(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose memory holds the opposite numbers."""
    return {name: torch.complex(torch.zeros_like(x), -x).conj().imag for name, x in inputs.items()}


def transposed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.transpose(-2, -1).contiguous().transpose(-2, -1).flip(-1).flip(-1) for name, x in inputs.items()}


def without_last(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(state.items())[:-1])


def with_each(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: change(x) for name, x in tensors.items()}


#: A context, and changes of inputs and state.
CHANGES: dict[str, tuple[Callable, Callable, Callable]] = {
    "nothing": (no_context, dict, dict),
    "inference mode": (torch.inference_mode, dict, dict),
    "kernels off": (lambda: environment(dispatch.VARIABLE, "0"), dict, dict),
    "a wrong switch": (lambda: environment(dispatch.VARIABLE, "2"), dict, dict),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), dict, dict),
    "double precision": (no_context, with_each(Tensor.double), dict),
    "half precision": (no_context, with_each(Tensor.half), dict),
    "another class": (no_context, marked, dict),
    "negated": (no_context, negated, dict),
    "another layout": (no_context, transposed, dict),
    "another batch": (no_context, with_each(lambda x: x[:1]), with_each(lambda x: x[:1])),
    "another batch than the state": (no_context, with_each(lambda x: x[:1]), dict),
    "an incomplete state": (no_context, dict, without_last),
    "a state of half precision": (no_context, dict, with_each(lambda x: x.half())),
    "a state that is too wide": (no_context, dict, with_each(lambda x: torch.cat([x, x], dim=-1))),
    "a device as a context": (lambda: torch.device("cpu"), dict, dict),
}


def outcome(run: Callable, *arguments: Any) -> Any:
    """The result of ``run``, or its error."""
    try:
        return run(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def next_token(module: InnerAttention, inputs: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    out, state = module.extend(**inputs, state=state)
    return {"out": out, **state}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call of kernels."""
    made, run = [], threads.run

    def counted(*arguments: Any) -> None:
        made.append(None)
        run(*arguments)

    monkeypatch.setattr(threads, "run", counted)
    return made


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_the_next_token_is_as_for_a_module_that_remembers_nothing(name, change, calls):
    context, of_inputs, of_state = CHANGES[change]
    used, outcomes = [], []
    for module in (build(name), build(name)):
        state = state_of(build(name) if outcomes else module)
        inputs, state = of_inputs(token(module, 9)), of_state(state)
        calls.clear()
        with torch.no_grad(), context():
            outcomes.append(outcome(next_token, module, inputs, state))
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
    module = build(name)
    state, inputs = state_of(module), token(module, 9)
    fresh = build(name)
    leaves = [x.clone().requires_grad_() for x in inputs.values()]

    def out(module: InnerAttention, *tensors: Tensor) -> Tensor:
        return module.extend(**dict(zip(inputs, tensors)), state=state)[0]

    def gradient(module: InnerAttention) -> Tensor:
        return torch.autograd.grad(out(module, *leaves).square().sum(), leaves[2])[0]

    def tangent(module: InnerAttention) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs.values()]
            return forward_ad.unpack_dual(out(module, *duals)).tangent

    def each_row(module: InnerAttention) -> Tensor:
        # The state is not mapped, so that rows of it are read by all.
        one = {key: x[:1] for key, x in state.items()}

        def row(*tensors: Tensor) -> Tensor:
            return module.extend(**dict(zip(inputs, (x[None] for x in tensors))), state=one)[0]

        with torch.no_grad():
            return torch.func.vmap(row)(*inputs.values())

    def flops(module: InnerAttention) -> Tensor:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            out(module, *inputs.values())
        return torch.tensor(counter.get_total_flops())

    def fake(module: InnerAttention) -> torch.Size:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            return out(module, *inputs.values()).shape

    assert outcome(fake, module) == outcome(fake, fresh)  # an error where a count is compared with the longest length
    for run in (gradient, tangent, each_row, flops):
        assert_close(run.__name__, run(module).double(), run(fresh).double(), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_another_dtype(name):
    """They were cast after tokens of a known kind; from then on each token is as without one."""
    module, fresh, inputs = build(name), build(name), token(build(name), 9)
    state = state_of(module)
    module.double()
    for _ in range(2):
        actual = outcome(torch.no_grad()(next_token), module, inputs, state)
        expected = outcome(torch.no_grad()(next_token), copy.deepcopy(fresh).double(), inputs, state)
        assert type(actual) is type(expected)
        for key, x in expected.items():
            assert actual[key].dtype == x.dtype
            assert_close(key, actual[key].double(), x.double(), 1e-5)


def test_a_subclass_with_another_function_has_no_step_of_its_parent():
    kind = ATTENTIONS["linear"]

    class Doubled(kind):
        """Twice linear attention."""

        def apply_op(self, *tensors: Tensor, **arguments: Any) -> Any:
            out, state = super().apply_op(*tensors, **arguments)
            return 2 * out, state

    module, inputs = Doubled(True), token(build("linear"), 9)
    state = state_of(module)
    with torch.no_grad():
        expected, _ = build("linear").extend(**inputs, state=state)
        assert_close("out", module.extend(**inputs, state=state)[0], 2 * expected)
