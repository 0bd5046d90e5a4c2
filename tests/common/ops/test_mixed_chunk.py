"""Mixed chunk attention: any combination of options, the equations written out, blocks on a CPU, and its state."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from common.ops import gau_attention, mixed_chunk_attention
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.quadratic.reference import gau_attention_reference
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, doubled, mixed_chunk_inputs, padding, qkv
from tests.compare import assert_all_close, assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def assert_same(out, expected, leaves) -> None:
    """Compare outputs and gradients; a leaf that does not affect one output must not affect the other."""
    assert_close("out", out, expected)
    found, wanted = (gradients(x + 0 * sum(leaf.sum() for leaf in leaves), leaves) for x in (out, expected))
    assert_all_close(range(len(leaves)), found, wanted)


def in_pieces(inputs, pieces, mask=None, **options):
    """The outputs of consecutive ``pieces`` of these lengths, causal, and the last state."""
    outputs, state, begin = [], None, 0
    for length in pieces:
        part = slice(begin, begin + length)
        options |= {"initial_state": state, "key_padding_mask": None if mask is None else mask[:, part]}
        tokens = (x[..., part, :] for x in inputs)
        out, state = mixed_chunk_attention(*tokens, causal=True, return_state=True, **options)
        outputs, begin = [*outputs, out], begin + length
    return torch.cat(outputs, dim=-2), state


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=80)
def test_any_combination(data):
    """The reference, forward and in gradients; and in pieces, if causal."""
    pieces = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), "pieces")
    tokens, heads = sum(pieces), data.draw(st.sampled_from([None, 1, 2]), "heads")
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    mask = data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask")
    chunk_size, causal = data.draw(st.integers(1, 12), "chunk_size"), data.draw(st.booleans(), "causal")
    options = data.draw(st.sampled_from([{}, {"linear": False}, {"local": False}]), "terms")
    with_local = options.get("local", True)
    more = data.draw(st.sampled_from(["none", "first_softmax", "first_to_all", "overlap"]), "more")
    if with_local and (more == "overlap" or (not causal and more != "none")):
        options = {**options, more: True}
    if data.draw(st.booleans(), "chunk_summaries"):
        options = {**options, "chunk_summaries": True}
    options = {**options, "chunk_size": chunk_size, "kernel": data.draw(st.sampled_from(SCORE_KERNELS), "kernel")}
    reach = chunk_size * (2 if "overlap" in options else 1)
    forms = ("no bias", "vector", "vectors") if "overlap" in options else BIASES
    bias = bias_like(data.draw(st.sampled_from(forms), "bias"), reach, heads or 1)
    sizes = {name: data.draw(st.integers(1, 4), name) for name in ("s", "e", "seed")}
    inputs = mixed_chunk_inputs(tokens, heads=heads, **sizes)
    arguments = {"bias": bias, "causal": causal, "key_padding_mask": mask, **options}
    out, expected = (f(*inputs, **arguments) for f in (mixed_chunk_attention, mixed_chunk_attention_reference))
    assert_same(out, expected, inputs if bias is None else [*inputs, bias])
    if causal:
        whole, last = in_pieces(inputs, [tokens], mask, bias=bias, **options)
        out, state = in_pieces(inputs, pieces, mask, bias=bias, **options)
        assert_close("at once", whole, expected)
        assert_close("in pieces", out, expected)
        for name, x in last.items():
            assert_close(name, state[name].double(), x.double())


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_any_combination_of_gau(data):
    tokens, heads = data.draw(st.integers(1, 17), "tokens"), data.draw(st.sampled_from([None, 1, 3]), "heads")
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    causal = data.draw(st.booleans(), "causal")
    options = {
        "causal": causal,
        "divisor": data.draw(st.sampled_from([None, 0.5, 17.0]), "divisor"),
        "key_padding_mask": data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask"),
        "kernel": data.draw(st.sampled_from(SCORE_KERNELS), "kernel"),
        "first_softmax": not causal and data.draw(st.booleans(), "first_softmax"),
        "bias": bias_like(data.draw(st.sampled_from(BIASES), "bias"), tokens, heads or 1),
    }
    inputs = qkv(tokens, heads=heads or 1, **{name: data.draw(st.integers(1, 6), name) for name in "de"})
    inputs = inputs if heads else [x.detach()[:, 0].requires_grad_() for x in inputs]
    leaves = inputs if options["bias"] is None else [*inputs, options["bias"]]
    assert_same(gau_attention(*inputs, **options), gau_attention_reference(*inputs, **options), leaves)


@causality
def test_equations_7_and_8_with_chunks_written_out(causal):
    """relu(Q Kᵀ / C + bias)² V in a chunk, and Q Σ Kᵀ V over all chunks / n or, causal, earlier ones / C; n = 3 C."""
    inputs, bias = mixed_chunk_inputs(12, heads=None), bias_like("matrix", 4)
    q_quad, k_quad, q_lin, k_lin, v = (x.unflatten(1, (3, 4)) for x in inputs)  # (B, G, C, c)
    weights = (torch.einsum("bgis,bgjs->bgij", q_quad, k_quad) / 4 + bias).relu().square()
    summed = torch.einsum("bgjs,bgje->bgse", k_lin, v)
    if causal:
        before = torch.stack([torch.zeros_like(summed[:, 0]), summed[:, 0], summed[:, 0] + summed[:, 1]], dim=1) / 4
        weights = weights.tril()
    else:
        before = (summed.sum(1, keepdim=True) / 12).expand_as(summed)
    expected = (weights @ v + torch.einsum("bgis,bgse->bgie", q_lin, before)).flatten(1, 2)
    out = mixed_chunk_attention(*inputs, chunk_size=4, bias=bias, causal=causal)
    assert_same(out, expected, [*inputs, bias])


def test_the_first_tokens_of_fine_tuned_units_attend_as_torchs_softmax_does():
    """The first token to its chunk, the first one of each chunk to the whole sequence, GAU's first token to all."""
    inputs, bias = mixed_chunk_inputs(14), bias_like("matrix", 4)
    q, k, _, _, v = inputs
    plain = {"chunk_size": 4, "linear": False, "bias": bias}
    expected = mixed_chunk_attention(*inputs, **plain)
    whole = F.scaled_dot_product_attention(q, k, v)
    first = F.scaled_dot_product_attention(q[:, :, :1], k[:, :, :4], v[:, :, :4], attn_mask=bias[:1])
    out = mixed_chunk_attention(*inputs, **plain, first_softmax=True)
    assert_close("first_softmax", out, torch.cat([first, expected[:, :, 1:]], 2))
    out, is_first = mixed_chunk_attention(*inputs, **plain, first_to_all=True), torch.arange(14) % 4 == 0
    assert_close("first_to_all", out, torch.where(is_first[:, None], whole, expected))
    q, k, v = qkv(300)  # two blocks of rows
    out = gau_attention(q, k, v, first_softmax=True, divisor=0.5)
    assert_close("of GAU", out[:, :, :1], F.scaled_dot_product_attention(q, k, v)[:, :, :1])
    assert torch.equal(out[:, :, 1:], gau_attention(q, k, v, divisor=0.5)[:, :, 1:])


# --- blocks on a CPU -------------------------------------------------------------------------------------------------


def attend(*inputs, chunk_size=90, mask=None):
    *tokens, bias = inputs
    return mixed_chunk_attention(*tokens, bias=bias, chunk_size=chunk_size, causal=True, key_padding_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("side", ["none", "holes"])
@pytest.mark.parametrize("length, chunk_size, batch, heads", [(2100, 256, 2, 1), (1500, 90, 1, 2), (40, 256, 60, 2)])
def test_blocks_are_plain_pytorch(length, chunk_size, batch, heads, side, dtype):
    """functorch takes plain PyTorch; a block has 1,024 tokens of one row or several, and a band of scores 64 rows."""
    inputs = mixed_chunk_inputs(length, batch=batch, heads=heads, s=8, e=6, dtype=dtype)
    leaves = [*inputs, bias_like("vectors", chunk_size, heads, dtype)]
    options = {"chunk_size": chunk_size, "mask": padding(side, batch, length)}
    out = attend(*leaves, **options)
    expected, pull = torch.func.vjp(lambda *x: attend(*x, **options), *(x.detach() for x in leaves))
    assert_close("out", out, expected)
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, weights, retain_graph=True)
    assert_all_close(NAMES, found, pull(weights))
    assert torch.equal(torch.autograd.grad(out, leaves[1:2], weights, retain_graph=True)[0], found[1]), "one alone"
    if dtype == torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(map(torch.equal, torch.autograd.grad(out, leaves, weights), found)), "under autocast"


def test_keys_that_follow_in_the_chunk_are_never_seen():
    """Later keys in the same band, in later bands, and in later chunks."""
    inputs = [x.detach() for x in mixed_chunk_inputs(400)]
    expected = attend(*inputs, None, chunk_size=150)
    for poison in (math.nan, math.inf):
        inputs[1][:, :, 170:] = poison
        assert torch.equal(attend(*inputs, None, chunk_size=150)[:, :, :170], expected[:, :, :170])


def test_transforms_of_blocks():
    """Batches of gradients, tangents (also of the bias alone), and second derivatives with one tensor in two places."""
    q, k, _, _, v = mixed_chunk_inputs(9, batch=1)
    leaves = [q, k, v, bias_like("vectors", 4)]

    def once(q, k, v, bias):
        return attend(q, k, q, k, v, bias, chunk_size=4)

    def literally(q, k, v, bias):
        return mixed_chunk_attention_reference(q, k, q, k, v, bias=bias, chunk_size=4, causal=True)

    second = []
    for op in (once, literally):
        first = torch.autograd.grad(op(*leaves).square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    assert_all_close("qkvb", *second)
    out = once(*leaves)
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    for i, weight in enumerate(weights):
        wanted = torch.autograd.grad(out, leaves, weight, retain_graph=True)
        assert_all_close("qkvb", [x[i] for x in batched], wanted)
    fixed = [x.detach() for x in leaves]
    for which, x in enumerate(fixed):
        direction = torch.randn_like(x)

        def moved(y, which=which):
            return once(*fixed[:which], y, *fixed[which + 1 :])

        expected = (moved(x + 1e-6 * direction) - moved(x - 1e-6 * direction)) / 2e-6
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            assert_close("tangent", torch.autograd.forward_ad.unpack_dual(moved(dual)).tangent, expected, 1e-6)


def test_one_graph_is_for_any_length_and_does_not_grow_with_it():
    """Of mixed chunk attention, whose blocks are not traced, and of GAU with a bias over distances."""
    torch._dynamo.reset()
    sizes = []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph

    for length in (1200, 4800):
        leaves = [*mixed_chunk_inputs(length, dtype=torch.float32), bias_like("vectors", 4, dtype=torch.float32)]
        compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
        assert_close("out", compiled(*leaves, chunk_size=4), attend(*leaves, chunk_size=4))
    assert len(sizes) == 2 and sizes[0] == sizes[1]

    def gau(q, k, v, bias):
        return gau_attention(q, k, v, bias=bias, causal=True, divisor=3.0)

    for form in ("vectors", "matrix"):
        torch._dynamo.reset()
        compiled = torch.compile(gau, backend="eager", fullgraph=True, dynamic=True)
        for n in (19, 16, 23):
            leaves = [*qkv(n), bias_like(form, n)]
            with torch.compiler.set_stance("fail_on_recompile" if n != 19 else "default"):
                out = compiled(*leaves)
            assert_same(out, gau(*leaves), leaves)


@pytest.mark.parametrize("chunk_size", [1, 5, 34])
@pytest.mark.parametrize("terms", [{}, {"local": False}, {"linear": False}], ids=["both", "linear", "local"])
def test_steps_of_rows_that_are_at_different_places(terms, chunk_size):
    """No mask: the rows' prompts had different lengths. Decoding spans three chunks, so that blocks of slots change."""
    tokens, prompt = 2 * chunk_size + 40, 9
    inputs, mask = mixed_chunk_inputs(tokens), torch.zeros(2, tokens, dtype=torch.bool)
    mask[0, :5] = True
    options = {"chunk_size": chunk_size, "bias": bias_like("matrices", chunk_size), **terms}
    whole, last = in_pieces(inputs, [tokens], mask, **options)
    expected = mixed_chunk_attention(*inputs, causal=True, key_padding_mask=mask, **options)
    out, state = in_pieces([x[:, :, :prompt] for x in inputs], [prompt], mask[:, :prompt], **options)
    outputs = [out]
    for t in range(prompt, tokens):
        step = (x[:, :, t : t + 1] for x in inputs)
        out, state = mixed_chunk_attention(*step, causal=True, initial_state=state, return_state=True, **options)
        outputs.append(out)
    assert_close("whole", whole, expected)
    assert_close("steps", torch.cat(outputs, dim=2), expected)
    for name, x in last.items():
        assert_close(name, state[name].double(), x.double())


@causality
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sums_in_half_precision_keep_their_precision(dtype, causal):
    """The causal sum grows with the number of chunks, and squared scores of GAU exceed bfloat16's 8 bits."""
    inputs = [x.detach().abs() / 2 for x in mixed_chunk_inputs(4096, batch=1, heads=None, s=8, e=4, dtype=dtype)]
    inputs = [x.requires_grad_() for x in inputs]
    out, exact = mixed_chunk_attention(*inputs, chunk_size=256, causal=causal), doubled(*inputs)
    expected = mixed_chunk_attention(*exact, chunk_size=256, causal=causal)
    assert_close("out", out, expected)
    found, wanted = gradients(out / 4096, inputs), gradients(expected / 4096, exact)  # within float16's range
    assert all(torch.isfinite(x).all() for x in found)
    if dtype == torch.bfloat16:
        assert_all_close(NAMES[:5], found, wanted)
    q, k, v = (x.detach() for x in qkv(4096, batch=1, heads=1, d=16, e=8, dtype=dtype))
    out = gau_attention(q, k, v, causal=causal, divisor=4.0)
    assert_close("GAU", out, gau_attention(q.float(), k.float(), v.float(), causal=causal, divisor=4.0))
