"""Combiner's row attention and joint softmax against their literal references and against torch's softmax."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from common.ops import combiner_attention, row_attention
from common.ops.combiner.reference import combiner_attention_reference, row_attention_reference
from tests.common.inputs import mixed_chunk_inputs, qkv
from tests.compare import assert_close, gradients
from tests.torch_versions import needs_newer_than_2_6

NAMES = ("q", "k", "v", "summary_k", "summary_v")
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def combiner_inputs(n, **sizes):
    """q, k, v, summary_k and summary_v."""
    q, k, summary_k, _, v = mixed_chunk_inputs(n, **sizes)
    return q, k, v, summary_k, mixed_chunk_inputs(n, **{"seed": 1, **sizes})[4]


def assert_same(out, expected, inputs) -> None:
    assert_close("out", out, expected)
    actual_gradients, expected_gradients = (
        gradients(x + 0 * sum(leaf.sum() for leaf in inputs), inputs) for x in (out, expected)
    )
    for name, actual, other in zip(NAMES, actual_gradients, expected_gradients):
        assert_close(f"gradient of {name}", actual, other)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_any_combination_agrees(data):
    tokens, causal = data.draw(st.integers(1, 17), "tokens"), data.draw(st.booleans(), "causal")
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    options = {
        "row_length": data.draw(st.integers(1, 20), "row_length"),
        "key_padding_mask": data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask"),
    }
    inputs = combiner_inputs(tokens, heads=data.draw(st.integers(1, 3), "heads"))
    out = combiner_attention(*inputs, causal=causal, **options)
    assert_same(out, combiner_attention_reference(*inputs, causal=causal, **options), inputs)
    out, expected = (op(*inputs[:3], **options) for op in (row_attention, row_attention_reference))
    assert_same(out, expected, inputs[:3])


def test_row_attention_is_torchs_softmax_in_each_row():
    q, k, v = inputs = qkv(12)
    expected = F.scaled_dot_product_attention(*(x.unflatten(2, (3, 4)) for x in (q, k, v))).flatten(2, 3)
    assert_same(row_attention(q, k, v, row_length=4), expected, inputs)


@causality
def test_the_joint_softmax_is_torchs_over_a_masked_list_of_all_keys(causal):
    """Token (row r, column c) sees keys of row r and summaries of column c: of all rows, or, causal, of rows before."""
    q, k, v, summary_k, summary_v = inputs = combiner_inputs(12)
    token = torch.arange(12)
    row, column = token // 4, token % 4
    near, far = row[:, None] == row, column[:, None] == column
    if causal:
        near, far = near & (token <= token[:, None]), far & (row < row[:, None])
    keys, values = torch.cat([k, summary_k], dim=2), torch.cat([v, summary_v], dim=2)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.cat([near, far], dim=1))
    assert_same(combiner_attention(*inputs, row_length=4, causal=causal), expected, inputs)


def test_one_row_is_causal_softmax_attention():
    inputs = combiner_inputs(13)
    for row_length in (13, 40):
        expected = F.scaled_dot_product_attention(*inputs[:3], is_causal=True)
        assert_same(combiner_attention(*inputs, row_length=row_length, causal=True), expected, inputs)


@needs_newer_than_2_6
def test_a_compiled_row_that_is_not_full_agrees():
    """For any length; inductor itself once misread a number of rows that was 1 but not known to be 1."""
    compiled = torch.compile(combiner_attention, fullgraph=True)
    inputs = [x.detach() for x in combiner_inputs(10, s=16, e=16, dtype=torch.float32)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    out = compiled(*inputs, row_length=16, causal=True)
    assert_close("out", out, combiner_attention(*inputs, row_length=16, causal=True))
