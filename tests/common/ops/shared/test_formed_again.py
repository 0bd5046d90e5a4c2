"""Tensors that are formed again: the same gradients of any order, less kept, and all kept where others decide."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.ops.shared import formed_again
from common.ops.shared.formed_again import forming_again
from tests.torch_versions import needs_forming_again


class Sine:
    """sin(x) w, of which autograd would keep x and sin(x); counts how often sin is computed."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = torch.randn(6, 6, dtype=torch.float64).requires_grad_()

    def sine(self, x: Tensor) -> list[Tensor]:
        """sin(x) and its square."""
        self.calls += 1
        return [x.sin(), x.sin().square()]

    def __call__(self, x: Tensor) -> Tensor:
        with forming_again(x) as form_again:
            first, second = self.sine(x)
            out = (first @ self.weight).square() + second.T.flatten(0) @ second.flatten()
            form_again([first, second], self.sine, x)
        return out


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(formed_again, "LEAST_NUMBERS", 0)


def tensor() -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def test_gradients_of_both_orders_are_those_of_autograd():
    assert torch.autograd.gradcheck(Sine(), tensor())
    assert torch.autograd.gradgradcheck(Sine(), tensor())


@needs_forming_again
def test_what_is_formed_again_is_not_kept_and_is_formed_once_for_each_pass():
    function, x = Sine(), tensor()
    kept = []
    with forming_again(x) as form_again:
        y = x.sin()
        kept.append(weakref.ref(y.untyped_storage()))
        out = (y @ function.weight).square().sum()
        form_again([y], lambda x: [x.sin()], x)
        del y
    assert kept[0]() is None
    expected = torch.autograd.grad((x.sin() @ function.weight).square().sum(), [x, function.weight])
    for _ in range(2):
        for actual, wanted in zip(torch.autograd.grad(out, [x, function.weight], retain_graph=True), expected):
            assert torch.equal(actual, wanted)
    out = function(x).sum()
    for passes in (1, 2):
        torch.autograd.grad(out, [x, function.weight], retain_graph=True)
        assert function.calls == 1 + passes


@needs_forming_again
def test_a_graph_that_is_not_used_is_freed():
    function = Sine()
    out, watched = function(tensor()), weakref.ref(function)
    del function
    assert watched() is not None
    del out
    gc.collect()
    assert watched() is None


def test_an_input_or_a_kept_tensor_that_was_changed_in_place_is_an_error():
    for change in ("x", "weight"):
        function, x = Sine(), tensor()
        out = function(x).sum()
        with torch.no_grad():
            (x if change == "x" else function.weight).mul_(2.0)
        with pytest.raises(RuntimeError, match="in.?place"):
            out.backward()


def calls_of_a_step(function, step) -> int:
    x = tensor()
    step(function, x).sum().backward()
    return function.calls


def under_other_hooks(function, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return function(x)


def in_a_checkpoint(function, x):
    return checkpoint(function, x, use_reentrant=False)


@needs_forming_again
def test_all_is_kept_where_somebody_else_decides_or_x_is_small(monkeypatch):
    assert calls_of_a_step(Sine(), Sine.__call__) == 2
    assert calls_of_a_step(Sine(), under_other_hooks) == 1
    assert calls_of_a_step(Sine(), in_a_checkpoint) == 2  # the checkpoint's own second forward pass, and no more
    assert calls_of_a_step(Sine(), lambda function, x: torch.func.vjp(function, x)[0]) <= 1
    monkeypatch.setattr(formed_again, "LEAST_NUMBERS", 37)
    assert calls_of_a_step(Sine(), Sine.__call__) == 1
