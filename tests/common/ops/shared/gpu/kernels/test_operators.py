"""torch.compile calls kernels as operators, with the outputs and gradients of eager kernels."""

import pytest
import torch

from common.ops import flow_attention, mixed_chunk_attention
from common.ops.flow.causal import STATE_SUMS, empty_state
from tests.common.inputs import bias_like, mixed_chunk_inputs, padding, qkv
from tests.common.ops.shared.gpu.device import on_device
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import needs_newer_than_2_6

SMALL = {"batch": 2, "heads": 1, "dtype": torch.float32}


def flow(mask, *inputs, **options):
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    return flow_attention(*inputs, causal=True, competition="none", clamp=None, **masks, **options)


def mixed_chunk(mask, *inputs):
    *tokens, bias = inputs
    return mixed_chunk_attention(*tokens, bias=bias, chunk_size=5, causal=True, key_padding_mask=mask)


CASES = {
    "causal_flow_attention": (flow, qkv(9, **SMALL)),
    "mixed_chunk_attention": (
        mixed_chunk,
        (*mixed_chunk_inputs(9, **SMALL), bias_like("vector", 5, dtype=torch.float32)),
    ),
}


class Graphs:
    """A backend that runs the graph unchanged and records our operators with their arguments."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, graph, example):
        for node in graph.graph.nodes:
            if str(node.target).startswith("lineartime."):
                self.calls.append(node)
        return graph.forward


@needs_newer_than_2_6
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_call_is_one_operator_with_the_same_gradients(name):
    function, inputs = CASES[name]
    inputs, (mask,) = on_device(inputs), on_device([padding("left", 2, 9)])
    torch._dynamo.reset()
    graphs = Graphs()
    out = torch.compile(function, backend=graphs, fullgraph=True)(mask, *inputs)
    assert [str(node.target) for node in graphs.calls] == [f"lineartime.{name}.default"]
    expected = function(mask, *inputs)
    assert_close("out", out.cpu(), expected.cpu())
    actual, wanted = gradients(out.cpu(), inputs), gradients(expected.cpu(), inputs)
    assert_all_close(map(str, range(len(inputs))), actual, wanted)


@needs_newer_than_2_6
def test_a_state_passes_through_the_operator():
    inputs = on_device(qkv(9, **SMALL))

    def in_pieces(*inputs):
        out, state = flow(None, *(x[:, :, :5] for x in inputs), return_state=True)
        return torch.cat([out, flow(None, *(x[:, :, 5:] for x in inputs), initial_state=state)], 2)

    torch._dynamo.reset()
    out = torch.compile(in_pieces, backend="eager", fullgraph=True)(*inputs)
    expected = flow(None, *inputs)
    assert_close("out", out.cpu(), expected.cpu())
    assert_all_close("qkv", gradients(out.cpu(), inputs), gradients(expected.cpu(), inputs), 1e-4)


def arguments_of(name):
    """All arguments of an operator, for six tokens."""
    small, (mask,) = {**SMALL, "batch": 1}, on_device([padding("left", 1, 6)])
    if name == "mixed_chunk_attention":
        leaves = (*mixed_chunk_inputs(6, **small), bias_like("vector", 5, dtype=torch.float32))
        return (*on_device(leaves), mask, 5, True, "relu2", True, True, False, False)
    q, k, v = on_device(qkv(6, **small))
    state = empty_state(q, v)
    sums = (state[name] for name in STATE_SUMS)
    return (q, k, v, mask, state["count"], *sums, 1e-6, 0.0, True, 1e30, "sigmoid", "none", "sigmoid", 64)


@pytest.mark.parametrize("name", CASES)
def test_operators_keep_torchs_rules(name, with_pytorch):
    """Schema, registration of gradients, output shapes of fake tensors, and ahead-of-time graphs."""
    torch.library.opcheck(getattr(torch.ops.lineartime, name).default, arguments_of(name))
