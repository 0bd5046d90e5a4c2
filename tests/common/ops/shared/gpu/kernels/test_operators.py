"""torch.compile calls kernels as operators, whose outputs and gradients are those of eager kernels."""

import pytest
import torch

from common.ops import flow_attention, mixed_chunk_attention
from tests.common.inputs import bias_like, mixed_chunk_inputs, padding, qkv
from tests.common.ops.shared.gpu.kernels.device import on_device
from tests.compare import assert_all_close, assert_close, gradients

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
    """A backend that runs what it is given and remembers the operators of ours, with their arguments."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, graph, example):
        for node in graph.graph.nodes:
            if str(node.target).startswith("lineartime."):
                self.calls.append(node)
        return graph.forward


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
    found, wanted = gradients(out.cpu(), inputs), gradients(expected.cpu(), inputs)
    assert_all_close(map(str, range(len(inputs))), found, wanted)


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
