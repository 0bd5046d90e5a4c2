"""Kernels of the gated delta rule for CPUs: they agree with plain PyTorch and finite differences, in any layout."""

import math

import pytest
import torch
from torch import Tensor

from common.ops import gated_delta_attention
from common.ops.gated_delta.cpu.causal import applies
from common.ops.shared.cpu.dispatch import VARIABLE
from tests.compare import assert_all_close, gradients

pytest.importorskip("numba")

B, H = 3, 2
BARE = {"qk_activation": "none", "qk_norm": "none", "v_activation": "none"}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def inputs(
    n: int, d: int = 7, e: int = 5, *, decay: float | None = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """q, k, v, beta, perhaps log_decay, and the memory before the first token: leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, uniform: bool = False) -> Tensor:
        return (torch.rand if uniform else torch.randn)(B, H, *shape, generator=generator, dtype=torch.float64)

    tensors = {"q": draw(n, d), "k": draw(n, d) / d**0.5, "v": draw(n, e), "beta": draw(n, uniform=True)}
    if decay is not None:
        tensors["log_decay"] = -decay * draw(n, uniform=True)
    tensors["memory"] = draw(d, e)
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


def attend(tensors: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    """The outputs and the last memory."""
    others = {name: x for name, x in tensors.items() if name != "memory"}
    state = {"memory": tensors["memory"]} if "memory" in tensors else None
    out, state = gated_delta_attention(**others, **options, initial_state=state, return_state=True)
    return out, state["memory"]


def plainly(tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, **options) -> tuple[Tensor, Tensor]:
    """``attend`` without kernels."""
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        return attend(tensors, **options)


def assert_agrees(
    tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, tolerance: float = 1e-10, **options
) -> None:
    """Compare outputs, the last memory and all gradients of both with plain PyTorch."""
    assert applies(*(tensors.get(name) for name in ("q", "k", "v", "beta", "log_decay", "memory")))
    results, expected = attend(tensors, **options), plainly(tensors, monkeypatch, **options)
    assert_all_close(("out", "memory"), results, expected, tolerance)
    for pair in zip(results, expected):
        assert_all_close(tensors, *(gradients(x, tensors.values(), retain_graph=True) for x in pair), tolerance)


@pytest.mark.parametrize("decay", [None, 0.3, 30.0])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 257])
def test_lengths(n, decay, monkeypatch):
    """Parts of four tokens and of tiles, after a memory, with gradients through it."""
    assert_agrees(inputs(n, decay=decay), monkeypatch)


@pytest.mark.parametrize("d, e", [(1, 1), (1, 3), (3, 7), (7, 1), (16, 17), (64, 65), (65, 64)])
def test_sizes(d, e, monkeypatch):
    assert_agrees(inputs(70, d, e), monkeypatch)


def test_single_precision():
    """Outputs to 2e-6, gradients to 1e-5 of float64 on the same numbers."""
    tensors = inputs(150, 64, 64, dtype=torch.float32)
    double = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    results, expected = attend(tensors), attend(double)
    assert_all_close(("out", "memory"), results, expected, 2e-6)
    assert_all_close(tensors, gradients(results[0], tensors.values()), gradients(expected[0], double.values()), 1e-5)


LAYOUTS = {
    "a host's": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "every second": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2],
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 9])
def test_strides_change_no_bit(layout, n):
    """Those of inputs, and of the gradients of outputs; also for one token without gradients."""
    tensors = inputs(n)
    strided = {name: LAYOUTS[layout](x.detach()).requires_grad_() for name, x in tensors.items()}
    results = []
    for given, change in ((tensors, lambda x: x), (strided, LAYOUTS[layout])):
        out, memory = attend(given)
        with torch.no_grad():
            step = attend(given)
        loss = (change(out) * torch.arange(1.0, 6.0)).sum() + change(memory).square().sum()
        results.append((out, memory, *step, *torch.autograd.grad(loss, list(given.values()))))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_numbers_that_are_repeated(monkeypatch):
    """beta and gates for all heads, as views with a stride of 0."""
    tensors = inputs(9)
    shared = {name: tensors[name].detach()[:, :1].clone().requires_grad_() for name in ("beta", "log_decay")}
    expanded = {**tensors, **{name: x.expand(-1, H, -1) for name, x in shared.items()}}
    pair = attend(expanded)[0], plainly(expanded, monkeypatch)[0]
    assert_all_close(shared, *(gradients(out, shared.values()) for out in pair), 1e-10)


@pytest.mark.parametrize("decay", [None, 1.0])
@pytest.mark.parametrize("n", [1, 9])
def test_any_single_input_may_need_a_gradient(n, decay):
    tensors = inputs(n, decay=decay)
    expected = gradients(attend(tensors)[0], tensors.values())
    fixed = {name: x.detach() for name, x in tensors.items()}
    for (name, x), wanted in zip(tensors.items(), expected):
        assert torch.equal(gradients(attend({**fixed, name: x})[0], [x])[0], wanted), name


@pytest.mark.parametrize("decay", [None, 1.0])
@pytest.mark.parametrize("d, e", [(5, 3), (16, 16), (7, 34)])
def test_a_step_is_a_token(d, e, decay):
    """Without gradients a kernel of its own computes one token; the state that it gets does not change."""
    tensors = inputs(1, d, e, decay=decay)
    out, memory = attend(tensors)
    before = tensors["memory"].detach().clone()
    with torch.inference_mode():
        step = attend(tensors)
    assert_all_close(("out", "memory"), step, (out, memory), 1e-12)
    assert torch.equal(tensors["memory"], before)


@pytest.mark.parametrize("d, e", [(1, 1), (5, 3), (15, 17), (17, 15), (16, 32)])
def test_working_memory_is_large_enough(d, e, monkeypatch):
    """What follows it is not written."""
    allocate, guards = torch.empty, []

    def allocate_more(*size: int, **options) -> Tensor:
        memory = allocate(math.prod(size) + 64, **options).fill_(7.0)
        guards.append(memory[-64:])
        return memory[:-64].view(size)

    monkeypatch.setattr(torch, "empty", allocate_more)
    for n in (1, 70):
        tensors = inputs(n, d, e)
        attend(tensors)[0].sum().backward()
        with torch.no_grad():
            attend(tensors)
    assert len(guards) >= 6, "forward, backward and without gradients"
    assert all((guard == 7.0).all() for guard in guards)
