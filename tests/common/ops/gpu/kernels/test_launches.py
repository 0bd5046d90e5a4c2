"""The number of launches, which bounds the time of short inputs."""

import torch

from tests.common.ops.gpu.kernels.rows import attend, draw


def test_causal_flow_attention_launches_few_kernels(launches):
    """PyTorch adds two operations forward, which count the tokens."""
    tensors = draw("flow", 40)
    out = attend("flow", tensors)
    assert len(launches) == 9
    launches.clear()
    torch.autograd.grad(out.sum(), tensors.values())
    assert len(launches) == 10
