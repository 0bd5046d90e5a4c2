"""DAFT's functions give the same results under torch.export and torch.compile as in eager mode.

The contract tests their modules, and TorchScript with every option.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from common.ops import daft_conv, daft_full, daft_select
from tests.common.ops.daft.formulas import daft_inputs, normal
from tests.compare import assert_close, gradients
from tests.torch_versions import needs_newer_than_2_6

R_IMAGE, W = normal(2, 3, 5, seed=3).detach(), normal(64, 64, seed=3).detach()
INDEX, BIAS = torch.tensor([1, 4]), normal(2, seed=4).detach()


IMAGES = {
    "conv": lambda q, k, v, shape: daft_conv(q, k, v, R_IMAGE.to(v), spatial_shape=shape),
    "local": lambda q, k, v, shape: daft_conv(q, k, v, R_IMAGE.to(v), spatial_shape=shape, local_only=True),
    "select": lambda q, k, v, shape: daft_select(q, k, v, INDEX, BIAS.to(v), window=(3, 5), spatial_shape=shape),
}
images = pytest.mark.parametrize("name", IMAGES)


class _Image(nn.Module):
    """Images k (B, h, H, W) and v (B, d, H, W), whose size must stay dynamic in the traced graph."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, k, v):
        k_tokens, v_tokens = (x.flatten(2).transpose(1, 2) for x in (k, v))
        return self.function(v_tokens, k_tokens, v_tokens, v.shape[2:])


@needs_newer_than_2_6
@images
def test_export_with_dynamic_images(name):
    """Smaller than the window, and larger."""
    module, dims = _Image(IMAGES[name]), {2: torch.export.Dim("H", min=2, max=64), 3: torch.export.Dim("W", min=2)}
    program = torch.export.export(
        module, (normal(2, 2, 6, 7).detach(), normal(2, 4, 6, 7).detach()), dynamic_shapes=[dims] * 2
    )
    for shape in ((6, 7), (2, 3), (9, 2), (12, 12)):
        other = normal(2, 2, *shape).detach(), normal(2, 4, *shape, seed=1).detach()
        assert_close("out", program.module()(*other), module(*other))


def test_causal_daft_full_has_few_graphs_for_many_lengths():
    """One graph for lengths of 49 to 64, one for 33 to 48, one for 9 to 16, one up to 8."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def function(q, k, v):
        return daft_full(q, k, v, W.to(v), causal=True)

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for length in (50, 57, 49, 33, 41, 9, 15, 5):
        inputs = daft_inputs(length, 4)
        out, expected = compiled(*inputs), function(*inputs)
        assert_close("out", out, expected)
        for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs)):
            assert_close("gradient", actual, wanted)
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 1, 2, 2, 3, 3, 4]


def test_the_blocked_form_compiles_to_one_graph():
    """64 channels per head and a window of 40, too large for direct convolution."""
    torch._dynamo.reset()
    inputs, r = daft_inputs(70, 2, channels=128), normal(2, 40, seed=3)

    def function(q, k, v, r):
        return daft_conv(q, k, v, r, causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    out, expected = compiled(*inputs, r), function(*inputs, r)
    assert_close("out", out, expected)
    for actual, wanted in zip(gradients(out, [*inputs, r]), gradients(expected, [*inputs, r])):
        assert_close("gradient", actual, wanted)
