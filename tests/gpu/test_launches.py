"""fla's kernels where they are installed, and launches of every mechanism that are captured once and replayed."""

import pytest
import torch

from common.kernels import FLA_KERNELS
from common.ops.shared.gpu import first_use
from tests.common.contract.mechanisms import DEFAULTS, PLAIN, cases, is_linear, leaves, tensors
from tests.compare import assert_all_close, assert_close, gradients

BY_FLA = {name for names in FLA_KERNELS.values() for name in names}
STATIC = [case for case in PLAIN if case.causal and is_linear(case.kind)]


@cases(case for case in DEFAULTS if case.causal and case.name in BY_FLA)
def test_fla_passes_the_comparison_before_its_first_use(case):
    pytest.importorskip("fla")
    module, inputs = prepared(case, torch.bfloat16, tokens=37, channels=16)
    first_use.right.clear()
    module(**inputs)
    assert any("of fla" in str(key[0]) for key in first_use.right)


def prepared(case, dtype=torch.float32, tokens=21, **sizes):
    """The module and its inputs on the GPU."""
    module = case.build(dtype, **sizes).cuda()
    inputs = tensors(module, tokens, dtype=dtype, **sizes)
    there = {name: x.detach().cuda().requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    return module, {**inputs, **there}


def other_numbers(inputs):
    """Change the inputs in place, so that a graph that repeats old numbers is noticed."""
    with torch.no_grad():
        for x in inputs.values():
            if isinstance(x, torch.Tensor):
                x.mul_(0.5)


@cases(STATIC)
def test_a_forward_and_backward_pass_is_captured_and_replayed(case):
    """By ``torch.cuda.make_graphed_callables``; kernels are compared before, in its warm-up."""
    module, inputs = prepared(case)
    named = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}

    class OfTensors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *values):
            return self.module(**{**inputs, **dict(zip(named, values))})

    sample = tuple(x.detach().clone().requires_grad_() for x in named.values())
    replayed = torch.cuda.make_graphed_callables(OfTensors(), sample, allow_unused_input=True)
    other_numbers(inputs)
    out, expected = replayed(*named.values()), module(**inputs)
    assert_close("out", out.cpu(), expected.cpu(), 2e-5)
    found, wanted = (gradients(x.cpu(), named.values()) for x in (out, expected))
    assert_all_close(named, [x.cpu() for x in found], [x.cpu() for x in wanted], 1e-4)


@cases(STATIC)
def test_compiled_with_reduce_overhead(case):
    torch._dynamo.reset()
    module, inputs = prepared(case)
    compiled = torch.compile(module, mode="reduce-overhead")
    for _ in range(3):  # a graph is captured at the second call
        torch.compiler.cudagraph_mark_step_begin()
        other_numbers(inputs)
        out = compiled(**inputs)
        expected = module(**inputs)
        assert_close("out", out.detach().cpu(), expected.cpu(), 2e-5)
        named = leaves(inputs, module)
        found, wanted = (gradients(x.cpu(), named.values()) for x in (out, expected))
        assert_all_close(named, [x.cpu() for x in found], [x.cpu() for x in wanted], 1e-4)
