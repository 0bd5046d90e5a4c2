"""Every mechanism gives on a GPU what it gives on the CPU: in each dtype, under autocast, in parts and compiled."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from tests.common.contract.mechanisms import (
    DEFAULTS,
    PLAIN,
    at,
    both,
    cases,
    cast,
    is_linear,
    leaves,
    long_options,
    run_in_parts,
    tensors,
    tolerance_of,
)
from tests.common.inputs import padding
from tests.compare import assert_all_close, assert_close, gradients

TOKENS = 21


def on_gpu(module: nn.Module, inputs: dict) -> tuple[nn.Module, dict]:
    """A copy of the module, and the inputs as new leaves, on the GPU."""
    moved = {
        name: x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    return copy.deepcopy(module).cuda(), moved


def gradients_on_gpu(out: Tensor, inputs: dict, module: nn.Module) -> list[Tensor]:
    return [x.cpu() for x in gradients(out.cpu(), leaves(inputs, module).values())]


@cases(DEFAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients(dtype, case):
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs, mask = tensors(module, TOKENS, dtype=dtype), padding("left", 2, TOKENS)
    there, moved = on_gpu(module, inputs)
    doubled, tolerance = cast(inputs, torch.float64), tolerance_of(module, dtype)
    if dtype == torch.bfloat16 and find_spec("fla"):  # whose kernels get features in bfloat16
        tolerance *= 2
    out, expected = there(**moved, **both(mask.cuda())), exact(**doubled, **both(mask))
    assert out.is_cuda and out.dtype == dtype
    assert_close("out", out.cpu(), expected, tolerance)
    wanted = gradients(expected, leaves(doubled, exact).values())
    assert_all_close(leaves(inputs, module), gradients_on_gpu(out, moved, there), wanted, tolerance)


@cases(case for case in DEFAULTS if case.causal)
@pytest.mark.parametrize("side", ["none", "left"])
def test_decoding(side, case):
    """One token at a time after a prompt, with and without a graph of gradients."""
    module, mask = case.build(torch.float32), padding(side, 2, TOKENS)
    inputs = tensors(module, TOKENS, dtype=torch.float32)
    expected = module(**inputs, **both(mask))
    there, moved = on_gpu(module, inputs)
    mask = None if mask is None else mask.cuda()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            out, states = run_in_parts(there, moved, [17, 1, 1, 1, 1], mask)
        assert all(x.is_cuda for x in states[-1].values())
        assert_close("out", out.cpu(), expected, 2e-5)


@cases(case for case in PLAIN if not case.image)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, case):
    """As trained with mixed precision: weights and inputs in float32, more tokens than a chunk has."""
    tokens = 1024 if is_linear(case.kind) else 300
    module = case._replace(options=long_options(case.kind)).build(torch.float32, 0.3, tokens)
    inputs = tensors(module, tokens, batch=1, dtype=torch.float32)
    expected, tolerance = module(**inputs), 2 * tolerance_of(module, dtype)
    there, moved = on_gpu(module, inputs)
    with torch.autocast("cuda", dtype=dtype):
        out = there(**moved)
    assert_close("out", out.cpu(), expected, tolerance)
    wanted = gradients(expected, leaves(inputs, module).values())
    assert_all_close(leaves(inputs, module), gradients_on_gpu(out.float(), moved, there), wanted, tolerance)


@cases(case for case in PLAIN if is_linear(case.kind) and not case.image)
@pytest.mark.parametrize("chunks", ["several chunks", "one chunk"])
def test_compiled(chunks, case):
    """Also in one chunk, where every sum over chunks has one term."""
    torch._dynamo.reset()
    module = (case if chunks == "several chunks" else case._replace(options=long_options(case.kind))).build(
        torch.float32
    )
    inputs = tensors(module, TOKENS, dtype=torch.float32)
    expected = module(**inputs)
    there, moved = on_gpu(module, inputs)
    out = torch.compile(there)(**moved)
    assert_close("out", out.cpu(), expected, 2e-5)
    wanted = gradients(expected, leaves(inputs, module).values())
    assert_all_close(leaves(inputs, module), gradients_on_gpu(out, moved, there), wanted, 1e-4)


@cases(case for case in PLAIN if case.causal and is_linear(case.kind) and not case.image)
@torch.no_grad()
def test_a_decoding_step_in_a_cuda_graph(case):
    """Captured once and replayed with other numbers: a step neither waits for the GPU nor depends on its numbers."""
    module = case.build(torch.float32)
    if module.state_tokens() is None:
        pytest.skip("the state grows with each token")
    inputs = tensors(module, 40, dtype=torch.float32, grad=False)
    there, moved = on_gpu(module, inputs)
    part = [at(moved, tokens) for tokens in (slice(38), slice(38, 39), slice(39, 40))]  # either token may be the next
    _, state = there.extend(**part[0])
    first, second = part[1:]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            there.extend(**first, state=state)
    torch.cuda.current_stream().wait_stream(stream)
    fixed = {name: x if x is None else x.clone() for name, x in first.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = there.extend(**fixed, state=state)
    for name, x in second.items():
        if x is not None:
            fixed[name].copy_(x)
    graph.replay()
    assert_close("replayed", out, there.extend(**second, state=state)[0], 1e-5)
