"""Bidirectional Flow-Attention in blocks with a manual backward pass."""

import pytest
import torch
from torch.autograd import forward_ad

from common.ops import flow_attention
from common.ops.flow.reference import flow_attention_reference
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map_gradient, real_features
from recipes.bench.harness.memory import peak_beyond
from tests.common.inputs import padding, qkv
from tests.compare import assert_close, assert_gradients_close, gradients


@pytest.mark.parametrize("d, e", [(1, 40), (40, 1), (16, 17), (17, 16), (20, 20)])
def test_few_and_many_channels(d, e):
    inputs = qkv(13, 21, d=d, e=e)
    masks = {"key_padding_mask": padding("right", 2, 21), "query_padding_mask": padding("both", 2, 13)}
    out, expected = (attend(*inputs, **masks) for attend in (flow_attention, flow_attention_reference))
    assert_close("out", out, expected, 1e-12)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)), 1e-11)


@pytest.mark.parametrize("n, batch, heads", [(2048, 2, 3), (1024, 2, 6), (256, 5, 6)])
@pytest.mark.parametrize("options", [{}, {"competition": "softmax_heads"}], ids=str)
def test_blocks_of_rows_and_heads_are_the_same_function(options, n, batch, heads):
    """Blocks of 2**18 numbers: 2 heads of a row and then 1, 4 heads and then 2, 2 rows at once and a last row."""
    inputs, mask = qkv(n, batch=batch, heads=heads, d=64, e=60), padding("left", batch, n)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out = flow_attention(*inputs, **masks, **options)
    rows, parts = range(batch), range(1 if options else heads)

    def alone(b: int, h: int) -> torch.Tensor:
        head = slice(None) if options else slice(h, h + 1)
        return flow_attention(
            *(x[b : b + 1, head] for x in inputs), **{name: x[b : b + 1] for name, x in masks.items()}, **options
        )

    expected = torch.cat([torch.cat([alone(b, h) for h in parts], dim=1) for b in rows])
    assert_close("out", out, expected, 1e-12)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)), 1e-11)


@pytest.mark.parametrize("head_dim", [5, 20])
def test_heads_in_the_order_of_one_projection(head_dim):
    """Heads cut from a linear layer's output, as in hosts: joining them again needs no copy, with the same result."""
    projected = torch.randn(2, 9, 3, 4, head_dim, dtype=torch.float64, requires_grad=True)
    inputs = [x.transpose(1, 2) for x in projected.unbind(2)]  # (B, H, n, d)
    out = flow_attention(*inputs)
    assert out.transpose(1, 2).is_contiguous()
    assert_gradients_close(out, flow_attention_reference(*inputs), {"projection": projected}, 1e-11)


def test_expanded_inputs_and_gradients():
    q, k, v = qkv(8, heads=1)
    results = []
    for attend in (flow_attention, flow_attention_reference):
        out = attend(*(x.expand(2, 3, 8, -1) for x in (q, k, v)))
        results.append(torch.autograd.grad(out.sum(), (q, k, v)))
    for name, actual, expected in zip("qkv", *results):
        assert_close(f"gradient of {name}", actual, expected, 1e-11)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
@pytest.mark.parametrize("twice", [False, True], ids=["first", "second derivative"])
def test_gradient_of_one_input_alone(wanted, twice):
    inputs = [x.detach().requires_grad_(name == wanted) for name, x in zip("qkv", qkv(9))]
    leaf = inputs["qkv".index(wanted)]
    results = []
    for attend in (flow_attention, flow_attention_reference):
        out = attend(*inputs, clamp=20.0).square().sum()
        (gradient,) = torch.autograd.grad(out, [leaf], create_graph=twice)
        results.append(torch.autograd.grad(gradient.square().sum(), [leaf])[0] if twice else gradient)
    assert_close(f"gradient of {wanted}", *results, 1e-10)


def test_batches_of_gradients():
    inputs = qkv(6)
    out = flow_attention(*inputs)
    batch = torch.randn(3, *out.shape, dtype=out.dtype)
    actual_gradients = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for name, actual, wanted in zip(
            "qkv", actual_gradients, torch.autograd.grad(out, inputs, batch[i], retain_graph=True)
        ):
            assert_close(f"gradient of {name}", actual[i], wanted, 1e-11)


def test_forward_derivative():
    inputs = [x.detach() for x in qkv(6)]
    step = torch.randn_like(inputs[0])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(flow_attention(forward_ad.make_dual(inputs[0], step), *inputs[1:])).tangent
    moved = [flow_attention(inputs[0] + sign * 1e-6 * step, *inputs[1:], clamp=1.0) for sign in (1, -1)]
    assert_close("tangent", tangent, (moved[0] - moved[1]) / 2e-6, 1e-6)


def test_a_backward_pass_under_autocast_is_as_precise():
    inputs = qkv(40, d=20, e=20, dtype=torch.float32)
    expected = gradients(flow_attention(*inputs), inputs)
    out = flow_attention(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (out @ out.transpose(-2, -1)).dtype == torch.bfloat16  # autocast is on
        actual_gradients = gradients(out, inputs)
    for name, actual, wanted in zip("qkv", actual_gradients, expected):
        assert_close(f"gradient of {name}", actual, wanted, 1e-6)


def test_memory_of_a_training_step():
    """Beyond inputs, output and gradients: not much more than q, whereas a graph would keep over four times as much."""
    inputs = qkv(4096, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.randn_like(inputs[0])

    def step():
        out = flow_attention(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, weights)

    step()
    assert peak_beyond(step, "cpu") < 1.25 * inputs[0].nbytes


@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_gradient_of_a_feature_map(phi):
    x = torch.tensor([-3.0, -0.1, 0.2, 5.0], dtype=torch.float64).view(1, 1, 4, 1).requires_grad_()
    for mask in (None, torch.tensor([[True, False, True, False]])):
        features = real_features(x, phi, mask)
        weights = torch.randn_like(features)
        (wanted,) = torch.autograd.grad(features, x, weights)
        actual = torch.empty_like(x)
        feature_map_gradient(weights, features.detach(), phi, out=actual)
        assert_close("gradient", actual, wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_second_derivatives_where_one_tensor_is_query_key_and_value(causal):
    """Each use of the tensor contributes once."""
    (x, _, _) = qkv(9)

    def second(attend):
        (first,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second(lambda x: flow_attention(x.clone(), x.clone(), x.clone(), causal=causal))
    assert_close("second derivative", second(lambda x: flow_attention(x, x, x, causal=causal)), expected)
