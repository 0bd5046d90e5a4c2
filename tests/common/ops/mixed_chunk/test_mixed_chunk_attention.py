"""Mixed chunk attention against its literal reference, the paper's equations and other functions."""

import math
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from common.ops import gau_attention, mixed_chunk_attention
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, doubled, mixed_chunk_inputs, padding
from tests.common.properties import assert_padding_never_leaks
from tests.compare import assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")
TERMS = {"both": {}, "local": {"linear": False}, "linear": {"local": False}}

kernels = pytest.mark.parametrize("kernel", SCORE_KERNELS)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def assert_same(out, expected, leaves) -> None:
    """Compare outputs and gradients; a leaf that does not affect one output must not affect the other."""
    assert_close("out", out, expected)
    actual_gradients, expected_gradients = (_gradients(x, leaves) for x in (out, expected))
    for name, actual, other in zip(NAMES, actual_gradients, expected_gradients):
        assert_close(f"gradient of {name}", actual, other)


def _gradients(out, leaves):
    return gradients(out + 0 * sum(leaf.sum() for leaf in leaves), leaves)


def assert_agrees(inputs, bias=None, **options) -> None:
    out = mixed_chunk_attention(*inputs, bias=bias, **options)
    expected = mixed_chunk_attention_reference(*inputs, bias=bias, **options)
    assert_same(out, expected, inputs if bias is None else [*inputs, bias])


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_any_combination_agrees(data):
    tokens, heads = data.draw(st.integers(1, 17), "tokens"), data.draw(st.sampled_from([None, 1, 3]), "heads")
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    chunk_size, causal = data.draw(st.integers(1, 20), "chunk_size"), data.draw(st.booleans(), "causal")
    term = data.draw(st.sampled_from(list(TERMS)), "term")
    fine_tuning = not causal and term != "linear"
    options = {
        "causal": causal,
        "chunk_size": chunk_size,
        "key_padding_mask": data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask"),
        "kernel": data.draw(st.sampled_from(SCORE_KERNELS), "kernel"),
        "first_softmax": fine_tuning and data.draw(st.booleans(), "first_softmax"),
        "first_to_all": fine_tuning and data.draw(st.booleans(), "first_to_all"),
        **TERMS[term],
    }
    sizes = {"s": data.draw(st.integers(1, 5), "s"), "e": data.draw(st.integers(1, 5), "e")}
    bias = bias_like(data.draw(st.sampled_from(BIASES), "bias"), chunk_size, heads or 1)
    assert_agrees(mixed_chunk_inputs(tokens, heads=heads, **sizes), bias, **options)


@causality
def test_inputs_without_heads_are_those_of_one_head(causal):
    inputs, mask = mixed_chunk_inputs(11, heads=None), padding("left", 2, 11)
    options = {"causal": causal, "key_padding_mask": mask, "chunk_size": 4}
    out = mixed_chunk_attention(*inputs, **options)
    assert torch.equal(out, mixed_chunk_attention(*(x[:, None] for x in inputs), **options)[:, 0])


def test_equation_8_with_chunks_written_out():
    """Causal: relu(Q Kᵀ / C + bias)² V below the diagonal of each chunk, Q Σ_{h<g} Kᵀ V / C across; n = 3 C."""
    inputs, bias = mixed_chunk_inputs(12, heads=None), bias_like("matrix", 4)
    q_quad, k_quad, q_lin, k_lin, v = (x.unflatten(1, (3, 4)) for x in inputs)  # (B, G, C, c)
    scores = torch.einsum("bgis,bgjs->bgij", q_quad, k_quad) / 4 + bias
    local = torch.where(scores > 0, scores**2, 0.0).tril() @ v
    summed = torch.einsum("bgjs,bgje->bgse", k_lin, v)
    before = torch.stack([torch.zeros_like(summed[:, 0]), summed[:, 0], summed[:, 0] + summed[:, 1]], dim=1)
    expected = (local + torch.einsum("bgis,bgse->bgie", q_lin, before) / 4).flatten(1, 2)
    out = mixed_chunk_attention(*inputs, chunk_size=4, bias=bias, causal=True)
    assert_same(out, expected, [*inputs, bias])


def test_equation_7_with_chunks_written_out():
    """Not causal: relu(Q Kᵀ / C + bias)² V in each chunk, Q Σ_h Kᵀ V / n over all of them; n = 3 C."""
    inputs, bias = mixed_chunk_inputs(12, heads=None), bias_like("matrix", 4)
    q_quad, k_quad, q_lin, k_lin, v = (x.unflatten(1, (3, 4)) for x in inputs)  # (B, G, C, c)
    scores = torch.einsum("bgis,bgjs->bgij", q_quad, k_quad) / 4 + bias
    local = torch.where(scores > 0, scores**2, 0.0) @ v
    expected = (local + torch.einsum("bgis,bhjs,bhje->bgie", q_lin, k_lin, v) / 12).flatten(1, 2)
    assert_same(mixed_chunk_attention(*inputs, chunk_size=4, bias=bias), expected, [*inputs, bias])


@kernels
@pytest.mark.parametrize("chunk_size", [13, 40])
def test_one_causal_chunk_is_flash_quad(chunk_size, kernel):
    """There is no term across chunks; scores are divided by C, however few tokens there are."""
    inputs, mask = mixed_chunk_inputs(13), padding("left", 2, 13)
    bias = bias_like("vectors", chunk_size)
    out = mixed_chunk_attention(
        *inputs, chunk_size=chunk_size, causal=True, key_padding_mask=mask, kernel=kernel, bias=bias
    )
    q, k, _, _, v = inputs
    options = {"bias": bias[:, chunk_size - 13 : chunk_size + 12], "kernel": kernel, "key_padding_mask": mask}
    divisor = None if kernel == "softmax" else float(chunk_size)
    assert_same(out, gau_attention(q, k, v, causal=True, divisor=divisor, **options), [*inputs, bias])


def test_chunks_of_one_token_are_a_cumulative_sum():
    inputs = mixed_chunk_inputs(9, heads=None)
    _, _, q, k, v = inputs
    outer = (k[:, :, :, None] * v[:, :, None]).cumsum(1)  # (B, n, s, e)
    before = torch.cat([torch.zeros_like(outer[:, :1]), outer[:, :-1]], dim=1)
    expected = torch.einsum("bns,bnse->bne", q, before)
    assert_same(mixed_chunk_attention(*inputs, chunk_size=1, causal=True, local=False), expected, inputs)


@causality
def test_softmax_in_a_chunk_is_torchs(causal):
    inputs = mixed_chunk_inputs(12)
    q, k, _, _, v = (x.unflatten(2, (3, 4)) for x in inputs)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).flatten(2, 3)
    out = mixed_chunk_attention(*inputs, chunk_size=4, linear=False, kernel="softmax", causal=causal)
    assert_same(out, expected, inputs)


def test_first_tokens_attend_to_everything_as_torchs_softmax_does():
    inputs, bias = mixed_chunk_inputs(14), bias_like("vector", 4)
    q, k, _, _, v = inputs
    options = {"chunk_size": 4, "linear": False, "bias": bias}
    out, plain = (mixed_chunk_attention(*inputs, **options, first_to_all=first) for first in (True, False))
    first = torch.arange(14) % 4 == 0
    assert_close("first tokens", out[:, :, first], F.scaled_dot_product_attention(q[:, :, first], k, v))
    assert torch.equal(out[:, :, ~first], plain[:, :, ~first])


def test_the_first_token_attends_to_its_chunk_as_torchs_softmax_does():
    inputs, bias = mixed_chunk_inputs(14), bias_like("matrix", 4)
    q, k, _, _, v = (x[:, :, :4] for x in inputs)
    options = {"chunk_size": 4, "linear": False, "bias": bias}
    out, plain = (mixed_chunk_attention(*inputs, **options, first_softmax=first) for first in (True, False))
    expected = F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=bias[:1])
    assert_close("first token", out[:, :, :1], expected)
    assert torch.equal(out[:, :, 1:], plain[:, :, 1:])


#: Options for fine-tuned units; the contract tests the others.
first = pytest.mark.parametrize("form", [{"first_softmax": True}, {"first_to_all": True}], ids=str)


@first
@kernels
def test_what_stands_in_padding_never_leaks(kernel, form):
    mask, bias = padding("all", 3, 19), bias_like("vectors", 8, dtype=torch.float32)
    inputs = mixed_chunk_inputs(19, batch=3, dtype=torch.float32)
    op = partial(mixed_chunk_attention, kernel=kernel, bias=bias, chunk_size=8, **form)
    assert_padding_never_leaks(op, inputs, [bias], mask, math.nan)


@causality
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sums_in_half_precision_keep_their_precision(dtype, causal):
    """The causal sum grows with the number of chunks; each k·v is positive, so that nothing cancels."""
    tokens = 8192
    inputs = [x.detach().abs() / 2 for x in mixed_chunk_inputs(tokens, batch=1, heads=None, s=8, e=4, dtype=dtype)]
    inputs = [x.requires_grad_() for x in inputs]
    exact = doubled(*inputs)
    out = mixed_chunk_attention(*inputs, chunk_size=256, causal=causal)
    expected = mixed_chunk_attention(*exact, chunk_size=256, causal=causal)
    assert_close("out", out, expected)
    # Weights of about 1 / tokens keep the true gradients within float16's range.
    for name, actual, other in zip(NAMES, _gradients(out / tokens, inputs), _gradients(expected / tokens, exact)):
        assert torch.isfinite(actual).all(), f"gradient of {name}"
        if dtype == torch.bfloat16:
            assert_close(f"gradient of {name}", actual, other)
