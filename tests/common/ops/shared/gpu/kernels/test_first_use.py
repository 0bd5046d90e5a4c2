"""The check before first use accepts correct kernels, and rejects them if one of their steps is wrong."""

import pytest
import torch

from common.ops.flow.causal import CausalInputs
from common.ops.flow.gpu import causal, chunks_kernels
from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.gpu import sequence
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens
from common.ops.shared.gpu import dispatch, first_use
from tests.common.inputs import padding, qkv
from tests.common.ops.shared.gpu.device import on_device

SIZES = {"batch": 1, "heads": 1, "d": 5, "e": 3}


def flow_use(dtype=torch.float32, mask=None, **options) -> first_use.FirstUse:
    (mask,) = on_device([mask])
    tensors = on_device(qkv(4, **SIZES, dtype=dtype))
    return causal.first_use(CausalInputs(*tensors, mask, flow_options(**options), 64, None))


def mixed_chunk_use(bias_shape=None, mask=None, **options) -> first_use.FirstUse:
    q, k, v = on_device(qkv(4, **SIZES, dtype=torch.float32))
    bias = None if bias_shape is None else on_device([torch.zeros(bias_shape)])[0]
    return sequence.first_use(Tokens(q, k, q, k, v), bias, MixedChunkOptions(20, **options), *on_device([mask]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flow_attention_is_found_right(dtype, with_pytorch):
    first_use.compare(flow_use(dtype, padding("left", 1, 4), allocation="softmax"))
    assert not dispatch.failed  # plain PyTorch, which would have replaced the backward pass, is right


@pytest.mark.parametrize("bias_shape", [None, (39,), (1, 20, 20)], ids=str)
def test_mixed_chunk_attention_is_found_right(bias_shape, with_pytorch):
    first_use.compare(mixed_chunk_use(bias_shape, padding("right", 1, 4), causal=True))
    first_use.compare(mixed_chunk_use(bias_shape, kernel="laplace"))


class Wrong:
    """A kernel that multiplies one of its outputs, an argument, by 1.2."""

    def __init__(self, kernel, output: int) -> None:
        self.kernel, self.output = kernel, output

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.kernel[grid](*args, **constants)
            args[self.output].mul_(1.2)

        return launch


def test_a_wrong_step_is_found(with_pytorch, monkeypatch):
    monkeypatch.setattr(chunks_kernels, "weights", Wrong(chunks_kernels.weights, 6))
    with pytest.raises(first_use.KernelsDiffer, match="output"):
        first_use.compare(flow_use())


def test_a_wrong_backward_step_is_found(with_pytorch, monkeypatch):
    monkeypatch.setattr(chunks_kernels, "weights_backward", Wrong(chunks_kernels.weights_backward, 9))
    with pytest.raises(first_use.KernelsDiffer, match="gradient"):
        first_use.compare(flow_use())
