"""Under torch.compile, kernels are operators with the results of eager calls; they are checked at their first use."""

import pytest
import torch

from common.ops.flow.causal import CausalInputs
from common.ops.flow.gpu import causal, chunks_kernels
from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.gpu import sequence
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens
from common.ops.shared.gpu import dispatch, first_use
from tests.common.inputs import padding
from tests.common.ops.gpu.kernels.rows import CHUNK, attend, draw, of_all, on_device
from tests.compare import assert_all_close, assert_close
from tests.torch_versions import needs_newer_than_2_6

OPERATORS = {"flow": "causal_flow_attention", "chunks": "mixed_chunk_attention"}
names = pytest.mark.parametrize("name", OPERATORS)


class Graphs:
    """A backend that runs the graph unchanged and records our operators and the arguments of their calls."""

    def __init__(self) -> None:
        self.calls, self.arguments = [], []

    def __call__(self, graph, example):
        interpreter = torch.fx.Interpreter(graph)
        call = interpreter.call_function

        def recorded(target, args, kwargs):
            if str(target).startswith("lineartime."):
                self.calls.append(str(target))
                self.arguments.append(args)
            return call(target, args, kwargs)

        interpreter.call_function = recorded
        return interpreter.run


@needs_newer_than_2_6
@names
def test_a_compiled_call_is_one_operator_that_keeps_torchs_rules(name, with_pytorch):
    """Its results and gradients; schema, shapes of fake tensors, registered gradients, and ahead-of-time graphs."""
    torch._dynamo.reset()
    tensors, mask, graphs = draw(name, 9), padding("left", 1, 9), Graphs()
    options = {"competition": "none", "clamp": None} if name == "flow" else {}
    out = torch.compile(attend, backend=graphs, fullgraph=True)(name, tensors, mask, **options)
    expected = attend(name, tensors, mask, **options)
    assert graphs.calls == [f"lineartime.{OPERATORS[name]}.default"]
    assert_close("out", out.cpu(), expected.cpu())
    assert_all_close(tensors, of_all(out, tensors), of_all(expected, tensors))
    arguments = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in graphs.arguments[0]]
    torch.library.opcheck(getattr(torch.ops.lineartime, OPERATORS[name]).default, tuple(arguments))


@needs_newer_than_2_6
def test_a_state_passes_through_the_operator():
    tensors = draw("flow", 9)

    def in_pieces(tensors):
        out, state = attend("flow", {x: y[:, :, :5] for x, y in tensors.items()}, return_state=True)
        return torch.cat([out, attend("flow", {x: y[:, :, 5:] for x, y in tensors.items()}, initial_state=state)], 2)

    torch._dynamo.reset()
    out, expected = torch.compile(in_pieces, backend="eager", fullgraph=True)(tensors), attend("flow", tensors)
    assert_close("out", out.cpu(), expected.cpu())
    assert_all_close(tensors, of_all(out, tensors), of_all(expected, tensors), 1e-4)


# --- the check before the first use ----------------------------------------------------------------------------------


def flow_use(dtype=torch.float32, mask=None, **options) -> first_use.FirstUse:
    inputs = CausalInputs(
        *draw("flow", 4, dtype=dtype).values(), on_device([mask])[0], flow_options(**options), 64, None
    )
    return causal.first_use(inputs)


def chunks_use(bias, mask=None, **options) -> first_use.FirstUse:
    *tokens, bias = [*draw("chunks", 4, bias=bias).values(), *([None] if bias == "no bias" else [])]
    return sequence.first_use(Tokens(*tokens), bias, MixedChunkOptions(CHUNK, **options), *on_device([mask]))


def test_right_kernels_are_found_right(with_pytorch):
    """Plain PyTorch, which would have replaced a failing backward pass, is right, so that nothing may have failed."""
    for dtype in (torch.float32, torch.bfloat16):
        first_use.compare(flow_use(dtype, padding("left", 1, 4), allocation="softmax"))
    first_use.compare(chunks_use("vector", padding("right", 1, 4), causal=True))
    for bias in ("no bias", "matrices"):
        first_use.compare(chunks_use(bias, kernel="laplace"))
    assert not dispatch.failed


class Wrong:
    """A kernel that multiplies one of its outputs, an argument, by 1.2."""

    def __init__(self, kernel, output: int) -> None:
        self.kernel, self.output = kernel, output

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.kernel[grid](*args, **constants)
            args[self.output].mul_(1.2)

        return launch


@pytest.mark.parametrize("step, output, found", [("weights", 6, "output"), ("weights_backward", 9, "gradient")])
def test_a_wrong_step_is_found(step, output, found, with_pytorch, monkeypatch):
    monkeypatch.setattr(chunks_kernels, step, Wrong(getattr(chunks_kernels, step), output))
    with pytest.raises(first_use.KernelsDiffer, match=found):
        first_use.compare(flow_use())
