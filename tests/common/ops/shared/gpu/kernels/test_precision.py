"""Half precision stays within the bounds of common/ops/shared/gpu/README.md, element by element, against float64."""

import pytest
import torch

from common.ops import flow_attention, mixed_chunk_attention
from common.ops.flow.reference import flow_attention_reference
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from tests.common.inputs import doubled, mixed_chunk_inputs, padding, qkv
from tests.common.ops.shared.gpu.device import on_device

#: Largest relative rounding error of a dtype, and half its smallest number.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}
#: For products of rounded numbers, sums in float32, and flows, which have float32 operands.
SLACK = 1.05

half = pytest.mark.parametrize("dtype", UNIT, ids=str)


def assert_within(name, actual, exact, sizes, roundings) -> None:
    """Check that |actual - exact| is at most this many roundings of ``sizes``, the sum of the terms' magnitudes."""
    bound = SLACK * roundings * UNIT[actual.dtype] * sizes + SMALLEST[actual.dtype]
    error = (actual.cpu().double() - exact).abs()
    assert (error <= bound).all(), f"{name}: {(error / bound).max():.3g} of the bound"


def gradient(out, x, of_out):
    return torch.autograd.grad(out, x, of_out.to(out), retain_graph=True)[0]


@half
@pytest.mark.parametrize("phi, scale", [("sigmoid", 1.0), ("elu+1", 300.0)])
def test_flow_attention(dtype, phi, scale):
    """In float16, products of features of 300 overflow unless they are scaled, and few others remain."""
    inputs = qkv(70, batch=2, heads=1, d=16, e=5, dtype=dtype)
    mask = padding("left", 2, 70)
    q, k, v = (x.detach() for x in inputs)
    tensors = on_device((q * scale, k * scale, v))
    options = {"causal": True, "phi": phi}
    (mask_there,) = on_device([mask])
    out = flow_attention(*tensors, **options, key_padding_mask=mask_there, query_padding_mask=mask_there)
    q, k, v = doubled(*(x.cpu() for x in tensors))
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    exact = flow_attention_reference(q, k, v, **options, **masks)
    sizes = flow_attention_reference(q, k, size := v.detach().abs().requires_grad_(), **options, **masks)
    assert_within("out", out, exact, sizes, 4)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
    grads = gradient(out, tensors[2], weights), gradient(exact, v, weights), gradient(sizes, size, weights.abs())
    assert_within("gradient of v", *grads, 4)


@half
@pytest.mark.parametrize("scale, values", [(1.0, 1.0), (0.02, 1.0), (30.0, 1e-3)])
def test_mixed_chunk_attention(dtype, scale, values):
    """In float16, weights of small scores vanish and those of large ones overflow unless they are scaled."""
    *operands, v = mixed_chunk_inputs(37, batch=1, heads=1, s=16, dtype=dtype)
    tensors = on_device([*((x.detach() * scale) for x in operands), v.detach() * values])
    options = {"chunk_size": 20, "causal": True}
    out = mixed_chunk_attention(*tensors, **options)
    q_quad, k_quad, q_lin, k_lin, v = doubled(*(x.cpu() for x in tensors))
    exact = mixed_chunk_attention_reference(q_quad, k_quad, q_lin, k_lin, v, **options)
    size = v.detach().abs().requires_grad_()
    sizes = mixed_chunk_attention_reference(q_quad, k_quad, q_lin.abs(), k_lin.abs(), size, **options)
    assert_within("out", out, exact, sizes, 2)
    weights = torch.linspace(-values, values, out.numel()).view(out.shape).to(dtype)
    grads = gradient(out, tensors[4], weights), gradient(exact, v, weights), gradient(sizes, size, weights.abs())
    assert_within("gradient of v", *grads, 2)
