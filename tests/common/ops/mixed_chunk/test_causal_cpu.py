"""Causal mixed chunk attention in blocks with a manual backward pass, against plain PyTorch and under transforms."""

import io
import math

import pytest
import torch
from torch.autograd import forward_ad

from common.ops import mixed_chunk_attention
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from tests.common.inputs import bias_like, mixed_chunk_inputs, padding
from tests.common.properties import bytes_kept
from tests.compare import assert_all_close, assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")


def attend(*inputs, chunk_size=4, mask=None, op=mixed_chunk_attention):
    *tokens, bias = inputs
    return op(*tokens, bias=bias, chunk_size=chunk_size, causal=True, key_padding_mask=mask)


def several_blocks() -> list[torch.Tensor]:
    """Inputs and a bias for chunks of 90 tokens: a block has 1,024 tokens, and a band of its scores 64 rows."""
    return [*mixed_chunk_inputs(1500), bias_like("vectors", 90)]


def assert_same(out, expected, leaves) -> None:
    """Compare outputs and gradients."""
    assert_close("out", out, expected)
    assert_all_close(NAMES[: len(leaves)], gradients(out, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("side", ["none", "holes"])
@pytest.mark.parametrize("length, chunk_size, batch, heads", [(2500, 256, 2, 1), (2100, 90, 1, 2), (40, 256, 60, 2)])
def test_blocks_agree_with_plain_pytorch(length, chunk_size, batch, heads, side, dtype):
    """functorch uses plain PyTorch; blocks cover one row or several, with a shorter block at the end."""
    inputs, mask = (
        mixed_chunk_inputs(length, batch=batch, heads=heads, s=16, e=24, dtype=dtype),
        padding(side, batch, length),
    )
    leaves = [*inputs, bias_like("vectors", chunk_size, heads, dtype)]
    out = attend(*leaves, chunk_size=chunk_size, mask=mask)
    plain = [x.detach() for x in leaves]
    expected, pull = torch.func.vjp(lambda *x: attend(*x, chunk_size=chunk_size, mask=mask), *plain)
    assert_close("out", out, expected)
    weights = torch.randn_like(out)
    assert_all_close(NAMES, torch.autograd.grad(out, leaves, weights), pull(weights))


def test_gradients_of_some_inputs_alone():
    leaves = several_blocks()
    expected = gradients(attend(*leaves, chunk_size=90), leaves)
    for i, name in enumerate(NAMES):
        alone = [x if i == j else x.detach() for j, x in enumerate(leaves)]
        assert_close(f"gradient of {name}", gradients(attend(*alone, chunk_size=90), [alone[i]])[0], expected[i])


def test_gradients_of_gradients_where_one_tensor_is_queries_and_keys_at_once():
    """This happens in attention without scales and offsets."""
    q, k, _, _, v = mixed_chunk_inputs(13, batch=1)
    leaves = [q, k, v, bias_like("vectors", 4)]

    def second(op):
        q, k, v, bias = leaves
        out = attend(q, k, q, k, v, bias, op=op)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    for name, actual, wanted in zip("qkvb", second(mixed_chunk_attention), second(mixed_chunk_attention_reference)):
        assert_close(f"second gradient of {name}", actual, wanted)


def test_a_batch_of_gradients():
    leaves = [*mixed_chunk_inputs(9, batch=1), bias_like("vectors", 4)]
    out = attend(*leaves)
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    actual_gradients = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    for i, weight in enumerate(weights):
        for name, actual, wanted in zip(
            NAMES, actual_gradients, torch.autograd.grad(out, leaves, weight, retain_graph=True)
        ):
            assert_close(f"gradient {i} of {name}", actual[i], wanted)


def test_functorch_and_forward_mode():
    inputs = [x.detach() for x in mixed_chunk_inputs(9, batch=3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    (expected,) = torch.autograd.grad(attend(*leaves, None).square().sum(), leaves[:1])

    def loss(*x):
        return attend(*(tensor[None] for tensor in x), None).square().sum()

    assert_close("gradient of q_quad", torch.func.vmap(torch.func.grad(loss))(*inputs), expected)
    tangents = [torch.randn_like(x) for x in inputs]
    _, wanted = torch.func.jvp(lambda *x: attend(*x, None), tuple(inputs), tuple(tangents))
    with forward_ad.dual_level():
        dual = attend(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents)), None)
        assert_close("tangent", forward_ad.unpack_dual(dual).tangent, wanted)


def test_forward_mode_in_the_bias_alone():
    inputs, bias = [x.detach() for x in mixed_chunk_inputs(9)], bias_like("vectors", 4).detach()
    direction = torch.randn_like(bias)
    _, wanted = torch.func.jvp(lambda bias: attend(*inputs, bias), (bias,), (direction,))
    with forward_ad.dual_level():
        dual = attend(*inputs, forward_ad.make_dual(bias, direction))
        assert_close("tangent", forward_ad.unpack_dual(dual).tangent, wanted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # reads shapes, which makes a trace fix them
def test_compiled_without_graph_breaks_and_traced():
    torch._dynamo.reset()
    leaves = [*mixed_chunk_inputs(22, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
    expected = attend(*leaves)
    assert_same(torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves), expected, leaves)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(attend, tuple(leaves)), file)
    file.seek(0)
    assert_close("out", torch.jit.load(file)(*leaves), expected)


def test_a_compiled_graph_does_not_repeat_itself_for_every_piece():
    torch._dynamo.reset()
    sizes = []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph

    for length in (1200, 4800):
        leaves = [*mixed_chunk_inputs(length, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
        torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)(*leaves)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_a_backward_pass_under_autocast_stays_precise():
    leaves = [*mixed_chunk_inputs(22, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
    expected = gradients(attend(*leaves), leaves)
    out = attend(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual_gradients = gradients(out, leaves)
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(actual_gradients, expected))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_follow_in_the_chunk_are_never_seen(poison):
    """Later keys in the same band, in later bands, and in later chunks."""
    inputs = [x.detach() for x in mixed_chunk_inputs(400)]
    expected = attend(*inputs, None, chunk_size=150)
    inputs[1][:, :, 170:] = poison
    assert torch.equal(attend(*inputs, None, chunk_size=150)[:, :, :170], expected[:, :, :170])


def test_what_is_kept_are_the_inputs_and_the_sums_before_each_chunk_but_the_first():
    inputs = mixed_chunk_inputs(4096, batch=1, heads=1, s=16, e=32, dtype=torch.float32)
    elements = bytes_kept(lambda: attend(*inputs, None, chunk_size=256)) // 4
    assert elements == sum(x.numel() for x in inputs) + (4096 // 256 - 1) * 16 * 32
