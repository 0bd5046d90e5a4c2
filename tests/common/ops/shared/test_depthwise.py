"""Depthwise convolution: in float32 what it is in float64, with gradients, for filters of any shape."""

import pytest
import torch
from torch.nn import functional as F

from common.ops.shared.depthwise import depthwise_conv2d
from tests.compare import assert_close

#: Of 49 rows and more with up to 3 columns, oneDNN's gradient of the filters can be wrong by a tenth and more.
SHAPES = [(1, 1), (3, 5), (5, 3), (63, 1), (63, 3), (129, 1), (1, 129)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape):
    x = torch.randn(2, 3, 90, 70, dtype=torch.float64)
    filters = torch.randn(3, 1, *shape, dtype=torch.float64)
    results = []
    for dtype, convolve in ((torch.float32, depthwise_conv2d), (torch.float64, _literal)):
        leaves = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in (x, filters)]
        out = convolve(*leaves)
        results.append([out, *torch.autograd.grad((out * x.to(dtype)).sum(), leaves)])
    for name, actual, expected in zip(("out", "gradient of x", "gradient of the filters"), *results):
        assert_close(name, actual, expected)


def _literal(x, filters):
    """The sum over the places of a filter, each a shift of x."""
    (height, width), (rows, columns) = filters.shape[2:], x.shape[2:]
    padded = F.pad(x, (width // 2, width // 2, height // 2, height // 2))
    return sum(
        padded[:, :, i : i + rows, j : j + columns] * filters[:, :, i, j].view(1, -1, 1, 1)
        for i in range(height)
        for j in range(width)
    )
