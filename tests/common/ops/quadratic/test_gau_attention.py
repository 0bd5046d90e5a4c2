"""The quadratic attention of the gated attention unit against its literal reference and other formulas."""

import math
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from common.ops import gau_attention
from common.ops.quadratic.reference import gau_attention_reference
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, doubled, padding, qkv
from tests.common.properties import assert_prefixes_stand_alone
from tests.compare import assert_close, gradients

kernels = pytest.mark.parametrize("kernel", SCORE_KERNELS)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

NAMES = ("q", "k", "v", "bias")


def without_heads(tensors):
    return [x.detach()[:, 0].requires_grad_() for x in tensors]


def assert_agrees(inputs, bias=None, **options) -> None:
    out = gau_attention(*inputs, bias=bias, **options)
    expected = gau_attention_reference(*inputs, bias=bias, **options)
    assert_close("out", out, expected)
    leaves = inputs if bias is None else [*inputs, bias]
    for name, actual, wanted in zip(NAMES, gradients(out, leaves), gradients(expected, leaves)):
        assert_close(f"gradient of {name}", actual, wanted)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=80)
def test_any_combination_agrees(data):
    tokens, heads = data.draw(st.integers(1, 17), "tokens"), data.draw(st.sampled_from([None, 1, 3]), "heads")
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    masks = st.lists(rows, min_size=2, max_size=2).map(torch.tensor)
    # The reference of nothing but padding is a constant, without gradients.
    mask = data.draw(st.none() | masks.filter(lambda mask: not mask.all()), "mask")
    causal = data.draw(st.booleans(), "causal")
    options = {
        "causal": causal,
        "divisor": data.draw(st.sampled_from([None, 0.5, 17.0]), "divisor"),
        "key_padding_mask": mask,
        "kernel": data.draw(st.sampled_from(SCORE_KERNELS), "kernel"),
        "first_softmax": not causal and data.draw(st.booleans(), "first_softmax"),
    }
    inputs = qkv(tokens, heads=heads or 1, d=data.draw(st.integers(1, 6), "s"), e=data.draw(st.integers(1, 6), "e"))
    inputs = inputs if heads else without_heads(inputs)
    bias = bias_like(data.draw(st.sampled_from(BIASES), "bias"), tokens, heads or 1)
    assert_agrees(inputs, bias, **options)


@causality
def test_inputs_without_heads_are_those_of_one_head(causal):
    inputs, mask = qkv(11, heads=1), padding("left", 2, 11)
    out = gau_attention(*without_heads(inputs), causal=causal, key_padding_mask=mask)
    assert torch.equal(out, gau_attention(*inputs, causal=causal, key_padding_mask=mask)[:, 0])


@causality
@pytest.mark.parametrize("tokens", [13, 300])
def test_it_is_the_formula_of_the_paper(tokens, causal):
    """A = relu(Q Kᵀ / n + bias)², masked above the diagonal when causal, O = A V."""
    (q, k, v), bias = qkv(tokens), bias_like("matrix", tokens)
    scores = torch.einsum("bhis,bhjs->bhij", q, k) / tokens + bias
    attention = torch.where(scores > 0, scores**2, 0.0)
    attention = attention.tril() if causal else attention
    expected = torch.einsum("bhij,bhje->bhie", attention, v)
    wanted = gradients(expected, [q, k, v, bias])
    for divisor in [float(tokens)] if causal else [float(tokens), None]:  # None counts the tokens that a query sees
        out = gau_attention(q, k, v, bias=bias, causal=causal, divisor=divisor)
        assert_close("out", out, expected)
        for name, actual, other in zip(NAMES, gradients(out, [q, k, v, bias]), wanted):
            assert_close(f"gradient of {name}", actual, other)


@causality
def test_softmax_is_torchs(causal):
    q, k, v = qkv(260)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close("out", gau_attention(q, k, v, kernel="softmax", causal=causal), expected)
    bias, mask = torch.randn(2, 260, 260, dtype=torch.float64), padding("right", 2, 260)
    visible = ~mask[:, None, None] & (torch.ones(260, 260).tril() > 0 if causal else torch.tensor(True))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~visible, -math.inf))
    out = gau_attention(q, k, v, kernel="softmax", causal=causal, bias=bias, key_padding_mask=mask)
    assert_close("out", out, expected.masked_fill(mask[:, None, :, None], 0.0))


def test_the_first_token_with_softmax_is_torchs():
    q, k, v = qkv(300)  # two blocks of rows
    out = gau_attention(q, k, v, first_softmax=True, divisor=0.5)
    assert_close("first", out[:, :, :1], F.scaled_dot_product_attention(q, k, v)[:, :, :1])
    assert torch.equal(out[:, :, 1:], gau_attention(q, k, v, divisor=0.5)[:, :, 1:])


@kernels
@pytest.mark.parametrize("divisor", [None, 2.0])
def test_a_prefix_does_not_depend_on_what_follows(divisor, kernel):
    op = partial(gau_attention, causal=True, divisor=divisor, kernel=kernel)
    assert_prefixes_stand_alone(op, qkv(260), (50, 255, 256, 257))


@kernels
def test_many_blocks_are_as_exact_in_half_precision_as_one(kernel):
    for dtype in (torch.bfloat16, torch.float16):
        for causal in (False, True):
            inputs, mask = qkv(260, batch=1, heads=1, dtype=dtype), padding("left", 1, 260)
            bias = bias_like("vector", 260, 1, dtype)
            exact, exact_bias = doubled(*inputs), *doubled(bias)
            options = {"kernel": kernel, "causal": causal, "key_padding_mask": mask}
            out = gau_attention(*inputs, bias=bias, **options)
            expected = gau_attention(*exact, bias=exact_bias, **options)
            assert out.dtype == dtype
            assert_close("out", out, expected)
            actual_gradients, expected_gradients = (
                gradients(out, [*inputs, bias]),
                gradients(expected, [*exact, exact_bias]),
            )
            for name, actual, other in zip(NAMES, actual_gradients, expected_gradients):
                assert_close(f"gradient of {name}", actual, other)


@causality
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_8192_tokens_in_half_precision_are_as_exact_as_they_can_be(dtype, causal):
    """No gradient; Σ over 8192 squared scores within float16's range but beyond bfloat16's 8 bits."""
    inputs = [x.detach() for x in qkv(8192, batch=1, heads=1, d=16, e=8, dtype=dtype)]
    out = gau_attention(*inputs, causal=causal, divisor=4.0)
    assert_close("out", out, gau_attention(*(x.float() for x in inputs), causal=causal, divisor=4.0))
