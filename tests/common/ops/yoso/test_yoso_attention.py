"""YOSO-E beyond the contract: its weights, gradients of parallel vectors, blocks, and transformers' module."""

import math

import pytest
import torch

from common.ops import yoso_attention
from common.ops.yoso.interface import GRADIENTS
from common.ops.yoso.reference import yoso_attention_reference
from tests.common.inputs import qkv
from tests.common.properties import bytes_kept, largest_tensor
from tests.compare import assert_close, assert_gradients_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def directions(angles: list[float]) -> torch.Tensor:
    """Unit vectors of the plane at ``angles``, as queries or keys (1, 1, n, 2)."""
    angle = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None, None]


def test_weights_are_the_probability_of_equal_hashes():
    """A query and a key share the sides of three random hyperplanes with the probability given by the weight."""
    q, k = directions([0.3]), directions([0.5, 1.4, 2.9])
    out = yoso_attention(q, k, torch.eye(3, dtype=torch.float64)[None, None], tau=3)
    planes = torch.randn(100_000, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sides = [(planes @ x[0, 0].T) > 0 for x in (q, k)]
    equal = (sides[0] == sides[1]).all(1).double().mean(0)
    assert_close("weights", out[0, 0, 0], equal / equal.norm(), 0.02)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_parallel_and_opposite_vectors_are_finite(dtype, gradient):
    """A query, an equal key, and its opposite: the cosine is 1 and -1, where arccos has no derivative."""
    _, _, v = qkv(4, batch=1, heads=1, d=3, dtype=dtype)
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [-1.0, -2.0, -3.0], [1.0, 2.0, 3.001]], dtype=dtype)[None, None]
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = (f(q, k, v, gradient=gradient) for f in (yoso_attention, yoso_attention_reference))
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3  # an angle of 0.001 is 5e-8 below a cosine of 1
    assert_close("out", out, expected, tolerance)
    assert_gradients_close(out, expected, {"q": q, "k": k, "v": v}, tolerance)


def test_the_exact_gradient_is_the_derivative_and_the_bound_is_half_tau_times_the_weights():
    inputs = qkv(6, batch=1, heads=1)
    assert torch.autograd.gradcheck(lambda q, k, v: yoso_attention(q, k, v, gradient="exact"), inputs)
    # With one key, only the weight's direction remains, so the test reads the sum of two keys at right angles.
    angle, tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), 4
    q = torch.stack([angle.cos(), angle.sin()])[None, None, None]
    out = yoso_attention(q, directions([0.0, math.pi / 2]), torch.eye(2, dtype=torch.float64)[None, None], tau=tau)
    slope = torch.autograd.grad(out[0, 0, 0, 0] / out[0, 0, 0, 1], angle)[0].item()
    first, second = (1 - 0.7 / math.pi) ** tau, (1 - (math.pi / 2 - 0.7) / math.pi) ** tau
    change = [tau / 2 * first * -math.sin(0.7), tau / 2 * second * math.cos(0.7)]
    assert abs(slope - (change[0] / second - first * change[1] / second**2)) < 1e-9


@causality
def test_blocks_of_rows_change_nothing(causal):
    """A block has 256 rows."""
    inputs, mask = qkv(300, batch=1, heads=1), (torch.arange(300) % 7 == 3)[None]
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out, expected = (attend(*inputs, causal=causal, **masks) for attend in (yoso_attention, yoso_attention_reference))
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)))


@causality
def test_nothing_larger_than_a_block_of_rows_is_made_or_kept(causal):
    def step(n: int) -> int:
        inputs = qkv(n, batch=1, heads=1, dtype=torch.float32)
        return largest_tensor(lambda: gradients(yoso_attention(*inputs, causal=causal), inputs))

    def kept(n: int) -> int:
        inputs = qkv(n, batch=1, heads=1, d=16, e=16, dtype=torch.float32)
        return bytes_kept(lambda: yoso_attention(*inputs, causal=causal))

    assert all(step(n) <= 256 * n for n in (300, 1000))
    assert kept(2048) <= 2.05 * kept(1024)


def test_it_is_the_expectation_of_transformers_with_its_gradient():
    """With a mask of 0 and -10000; transformers ignores the mask of 1 and 0 that its own model passes."""
    peer = pytest.importorskip("transformers.models.yoso.modeling_yoso")
    config = peer.YosoConfig(hidden_size=32, num_attention_heads=4, use_expectation=True, conv_window=None)
    layer, n = peer.YosoSelfAttention(config).eval(), 12
    x = torch.randn(1, n, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    padding = (torch.arange(n) >= 8)[None]

    def attend(mask):
        return layer(x, mask)[0].view(1, n, 4, 8).transpose(1, 2)[:, :, :8]

    q, k, v = (f(x).view(1, n, 4, 8).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    out = yoso_attention(q, k, v, tau=config.hash_code_len, key_padding_mask=padding)[:, :, :8]
    expected = attend(-10000.0 * padding)
    assert_close("out", expected, out)
    assert_gradients_close(expected, out, {"x": x})
    ignored = attend(1.0 * ~padding)
    assert (ignored - out).norm() > 0.1 * out.norm()
