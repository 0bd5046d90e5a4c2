"""Flow-Attention of all sinks with all sources in pieces with a backward pass by hand, against the graph of it."""

import pytest
import torch
from torch.autograd import forward_ad

from common.ops import flow_attention
from common.ops.flow import full_cpu
from common.ops.flow.full import flow_attention_in_graph, full_flow
from common.ops.flow.full_cpu import full_attention_in_blocks
from common.ops.flow.options import flow_options
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map_gradient, real_features
from recipes.bench.harness.memory import peak_beyond
from tests.common.inputs import SIDES, padding, qkv
from tests.compare import assert_close, gradients

OPTIONS = [
    {},
    {"clamp": 0.9},
    {"form": "paper", "phi": "elu+1"},
    {"form": "released_vision", "clamp": None, "allocation": "softmax"},
    {"form": "paper", "competition": "sigmoid", "allocation": "softmax"},
    {"competition": "sigmoid", "allocation": "none"},
    {"competition": "none", "phi": "relu"},
]


def assert_agrees(inputs, key_mask=None, query_mask=None, options=None) -> None:
    """Output and gradients are those of the graph."""
    arguments = (*inputs, key_mask, query_mask, flow_options(**(options or {})))
    out, expected = full_attention_in_blocks(*arguments), flow_attention_in_graph(*arguments)
    assert type(out.grad_fn).__name__ == "_InBlocksBackward"
    assert_close("out", out, expected, 1e-12)
    for name, actual, wanted in zip("qkv", gradients(out, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", actual, wanted, 1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_every_option_and_mask(side, options):
    assert_agrees(qkv(19, 11, batch=3), padding(side, 3, 11), padding("left", 3, 19), options)
    assert_agrees(qkv(11, 19, batch=3), padding("holes", 3, 19), padding(side, 3, 11), options)


@pytest.mark.parametrize("d, e", [(1, 40), (40, 1), (16, 17), (17, 16), (20, 20)])
def test_few_and_many_channels(d, e):
    assert_agrees(qkv(13, 21, d=d, e=e), padding("right", 2, 21), padding("both", 2, 13))


@pytest.mark.parametrize("piece, pieces", [(1, 15), (70, 15), (140, 9), (350, 3), (799, 2), (1050, 1), (10**6, 1)])
@pytest.mark.parametrize("side", ["none", "left"])
def test_pieces_of_any_size(side, piece, pieces, monkeypatch):
    """3 rows of 5 heads of 10 tokens and 7 channels: single heads, two, rows, two rows, all."""
    seen = []
    monkeypatch.setattr(full_cpu, "BLOCK_NUMBERS", piece)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(full_cpu, "full_flow", lambda *arguments: seen.append(1) or full_flow(*arguments))
    mask = padding(side, 3, 10)
    assert_agrees(qkv(10, batch=3, heads=5, d=7, e=6), mask, mask)
    assert len(seen) == pieces


@pytest.mark.parametrize("head_dim", [5, 20])
def test_heads_in_the_order_of_one_projection(head_dim):
    """As hosts cut them from a linear layer's output: no copy to join them again, and the same numbers."""
    projected = torch.randn(2, 9, 3, 4, head_dim, dtype=torch.float64, requires_grad=True)
    inputs = [x.transpose(1, 2) for x in projected.unbind(2)]  # (B, H, n, d)
    out = flow_attention(*inputs)
    assert out.transpose(1, 2).is_contiguous()
    (found,) = gradients(out, [projected])
    (wanted,) = gradients(flow_attention_in_graph(*inputs, None, None, flow_options()), [projected])
    assert_close("gradient of the projection", found, wanted, 1e-11)


def test_expanded_inputs_and_gradients():
    q, k, v = qkv(8, heads=1)
    expanded = [x.expand(2, 3, 8, -1) for x in (q, k, v)]
    options = flow_options()
    found = torch.autograd.grad(full_attention_in_blocks(*expanded, None, None, options).sum(), (q, k, v))
    wanted = torch.autograd.grad(flow_attention_in_graph(*expanded, None, None, options).sum(), (q, k, v))
    for name, actual, expected in zip("qkv", found, wanted):
        assert_close(f"gradient of {name}", actual, expected, 1e-11)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
@pytest.mark.parametrize("twice", [False, True], ids=["first", "second derivative"])
def test_gradient_of_one_input_alone(wanted, twice):
    inputs = [x.detach().requires_grad_(name == wanted) for name, x in zip("qkv", qkv(9))]
    leaf = inputs["qkv".index(wanted)]
    results = []
    for form in (full_attention_in_blocks, flow_attention_in_graph):
        out = form(*inputs, None, None, flow_options(clamp=20.0)).square().sum()
        (gradient,) = torch.autograd.grad(out, [leaf], create_graph=twice)
        results.append(torch.autograd.grad(gradient.square().sum(), [leaf])[0] if twice else gradient)
    assert_close(f"gradient of {wanted}", *results, 1e-10)


def test_batches_of_gradients():
    inputs = qkv(6)
    out = flow_attention(*inputs)
    batch = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for name, actual, wanted in zip("qkv", found, torch.autograd.grad(out, inputs, batch[i], retain_graph=True)):
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
        found = gradients(out, inputs)
    for name, actual, wanted in zip("qkv", found, expected):
        assert_close(f"gradient of {name}", actual, wanted, 1e-6)


def test_memory_of_a_training_step(monkeypatch):
    """Beyond inputs, output and gradients: not much more than q, of which the graph needs more than four times."""
    monkeypatch.setattr(full_cpu, "BLOCK_NUMBERS", 2**18 // torch.get_num_threads())  # a head at once
    inputs = qkv(4096, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.randn_like(inputs[0])
    size = inputs[0].nbytes

    def peak(form):
        def run():
            out = form(*inputs, None, None, flow_options())
            return out.detach(), *torch.autograd.grad(out, inputs, weights)

        run()
        return peak_beyond(run, "cpu")

    assert peak(full_attention_in_blocks) < 1.25 * size
    assert peak(flow_attention_in_graph) > 4 * size


@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_gradient_of_a_feature_map(phi):
    x = torch.tensor([-3.0, -0.1, 0.2, 5.0], dtype=torch.float64).view(1, 1, 4, 1).requires_grad_()
    for mask in (None, torch.tensor([[True, False, True, False]])):
        features = real_features(x, phi, mask)
        weights = torch.randn_like(features)
        (wanted,) = torch.autograd.grad(features, x, weights)
        found = torch.empty_like(x)
        feature_map_gradient(weights, features.detach(), phi, out=found)
        assert_close("gradient", found, wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_second_derivatives_where_one_tensor_is_query_key_and_value(causal):
    """Each use of the tensor counts once."""
    (x, _, _) = qkv(9)

    def second(attend):
        (first,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second(lambda x: flow_attention(x.clone(), x.clone(), x.clone(), causal=causal))
    assert_close("second derivative", second(lambda x: flow_attention(x, x, x, causal=causal)), expected)
