"""Causal mixed chunk attention in pieces: against the reference, the plain form, and under torch's transforms."""

import io
import math

import pytest
import torch
from torch.autograd import forward_ad

from common.ops import mixed_chunk_attention
from common.ops.mixed_chunk import causal_cpu
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from tests.common.inputs import BIASES, SIDES, bias_like, mixed_chunk_inputs, padding
from tests.compare import assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 8 tokens and blocks of 3 queries, so that few tokens make several of each."""
    monkeypatch.setattr(causal_cpu, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(causal_cpu, "BAND_ROWS", 3)


@pytest.fixture
def plainly(monkeypatch):
    """A function that calls another with the plain form in place of pieces."""

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(causal_cpu, "runs_eagerly", lambda *x: False)
            return function(*args, **kwargs)

    return call


def attend(*inputs, chunk_size=4, mask=None):
    *tokens, bias = inputs
    return mixed_chunk_attention(*tokens, bias=bias, chunk_size=chunk_size, causal=True, key_padding_mask=mask)


def runs_in_pieces(out) -> bool:
    """Whether the graph of ``out`` has the function with its own backward pass in it."""
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return any("InBlocks" in node.name() for node in seen)


def assert_same(out, expected, leaves) -> None:
    """Outputs and gradients agree; a leaf that has no part in either has none in both."""
    assert_close("out", out, expected)
    out, expected = (x + 0 * sum(leaf.sum() for leaf in leaves) for x in (out, expected))
    for name, actual, wanted in zip(NAMES, gradients(out, leaves), gradients(expected, leaves)):
        assert_close(f"gradient of {name}", actual, wanted)


@pytest.mark.parametrize("length, chunk_size", [(1, 4), (13, 5), (24, 4), (23, 20), (9, 1), (19, 7)])
@pytest.mark.parametrize("heads", [None, 2])
def test_several_pieces_and_blocks_agree_with_the_reference(heads, length, chunk_size, small_pieces):
    inputs = mixed_chunk_inputs(length, batch=2, heads=heads)
    for form in BIASES if heads else BIASES[:3]:
        bias = bias_like(form, chunk_size)
        out = attend(*inputs, bias, chunk_size=chunk_size)
        assert runs_in_pieces(out)
        expected = mixed_chunk_attention_reference(*inputs, bias=bias, chunk_size=chunk_size, causal=True)
        assert_same(out, expected, inputs if bias is None else [*inputs, bias])


@pytest.mark.parametrize("side", SIDES)
def test_padding_on_any_side_agrees_with_the_reference(side, small_pieces):
    """Rows of 3 tokens go through two at a time, those of 13 one after the other."""
    for length in (3, 13):
        inputs, bias, mask = mixed_chunk_inputs(length, batch=3), bias_like("vectors", 4), padding(side, 3, length)
        out = attend(*inputs, bias, mask=mask)
        assert runs_in_pieces(out)
        expected = mixed_chunk_attention_reference(*inputs, bias=bias, chunk_size=4, causal=True, key_padding_mask=mask)
        assert_same(out, expected, [*inputs, bias])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_pieces_of_the_real_size_agree_with_the_plain_form(dtype, plainly):
    for length, chunk_size, batch, heads in ((2500, 256, 2, 1), (2100, 90, 1, 2), (40, 256, 60, 2)):
        inputs = mixed_chunk_inputs(length, batch=batch, heads=heads, s=16, e=24, dtype=dtype)
        leaves = [*inputs, bias_like("vectors", chunk_size, heads, dtype)]
        out, expected = attend(*leaves, chunk_size=chunk_size), plainly(attend, *leaves, chunk_size=chunk_size)
        assert runs_in_pieces(out) and not runs_in_pieces(expected)
        assert_same(out, expected, leaves)


def test_other_kernels_terms_and_devices_take_the_plain_form():
    inputs = mixed_chunk_inputs(9)
    for options in (
        {"causal": False},
        {"kernel": "laplace"},
        {"kernel": "softmax"},
        {"local": False},
        {"linear": False},
    ):
        assert not runs_in_pieces(mixed_chunk_attention(*inputs, chunk_size=4, **{"causal": True, **options}))
    on_meta = (torch.empty_like(x, device="meta").requires_grad_() for x in inputs)
    assert not runs_in_pieces(attend(*on_meta, None))


def test_gradients_of_some_inputs_alone(small_pieces):
    leaves = [*mixed_chunk_inputs(13), bias_like("vectors", 4)]
    expected = gradients(attend(*leaves), leaves)
    for i, name in enumerate(NAMES):
        alone = [x if i == j else x.detach() for j, x in enumerate(leaves)]
        assert_close(f"gradient of {name}", gradients(attend(*alone), [alone[i]])[0], expected[i])


def test_a_backward_pass_can_be_repeated(small_pieces):
    """It changes nothing that it has kept."""
    leaves = [*mixed_chunk_inputs(13), bias_like("vectors", 4)]
    out = attend(*leaves)
    first, second = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_gradients_of_gradients_are_those_of_the_plain_form(small_pieces, plainly):
    """Also where one tensor is queries and keys at once, as in attention without scales and offsets."""
    q, k, _, _, v = mixed_chunk_inputs(13, batch=1)
    bias = bias_like("vectors", 4)

    def second(leaves):
        q, k, v, bias = leaves
        out = attend(q, k, q, k, v, bias)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    leaves = [q, k, v, bias]
    assert runs_in_pieces(attend(q, k, q, k, v, bias))
    for name, actual, wanted in zip("qkvb", second(leaves), plainly(second, leaves)):
        assert_close(f"second gradient of {name}", actual, wanted)


def test_a_batch_of_gradients(small_pieces):
    leaves = [*mixed_chunk_inputs(9, batch=1), bias_like("vectors", 4)]
    out = attend(*leaves)
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    for i, weight in enumerate(weights):
        for name, actual, wanted in zip(NAMES, found, torch.autograd.grad(out, leaves, weight, retain_graph=True)):
            assert_close(f"gradient {i} of {name}", actual[i], wanted)


def test_gradgradcheck(small_pieces):
    leaves = [*mixed_chunk_inputs(5, batch=1, heads=1, s=2, e=2), bias_like("matrix", 3)]
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, chunk_size=3), leaves)


def test_functorch_and_forward_mode(small_pieces, plainly):
    inputs = [x.detach() for x in mixed_chunk_inputs(9, batch=3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    (expected,) = torch.autograd.grad(attend(*leaves, None).square().sum(), leaves[:1])

    def loss(*x):
        return attend(*(one[None] for one in x), None).square().sum()

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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes that are read, which a trace keeps
def test_compiled_without_graph_breaks_and_traced():
    torch._dynamo.reset()
    leaves = [*mixed_chunk_inputs(22, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
    expected = attend(*leaves)
    assert_same(torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves), expected, leaves)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(attend, tuple(leaves)), file)
    file.seek(0)
    assert_close("out", torch.jit.load(file)(*leaves), expected)


def test_a_compiled_graph_does_not_repeat_itself_for_every_piece(small_pieces):
    torch._dynamo.reset()
    sizes = []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph

    for length in (24, 96):
        leaves = [*mixed_chunk_inputs(length, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
        torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)(*leaves)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_a_backward_pass_under_autocast_stays_precise():
    leaves = [*mixed_chunk_inputs(22, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
    expected = gradients(attend(*leaves), leaves)
    out = attend(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(out, leaves)
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(found, expected))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_follow_in_the_chunk_are_never_seen(poison, small_pieces):
    """They stand in the same block, in later ones, and in later chunks."""
    inputs = [x.detach() for x in mixed_chunk_inputs(14)]
    expected = attend(*inputs, None, chunk_size=7)
    inputs[1][:, :, 8:] = poison
    assert torch.equal(attend(*inputs, None, chunk_size=7)[:, :, :8], expected[:, :, :8])


def test_what_is_kept_are_the_inputs_and_the_sums_before_each_chunk_but_the_first():
    storages = {}

    def remember(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    inputs = mixed_chunk_inputs(4096, batch=1, heads=1, s=16, e=32, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        attend(*inputs, None, chunk_size=256)
    elements = sum(storage.nbytes() for storage in storages.values()) // 4
    assert elements == sum(x.numel() for x in inputs) + (4096 // 256 - 1) * 16 * 32
