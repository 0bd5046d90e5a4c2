"""The adapter keeps fairseq's contract and refuses what it cannot honour."""

import pytest
import torch

from common.attention import record_attention
from common.ops import flow_attention
from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention, LayerDesign
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.text import tokens


def _attention(**options) -> InnerMultiheadAttention:
    return InnerMultiheadAttention(16, 4, LayerDesign("flow"), causal=True, **options)


def test_equals_the_op_on_projected_heads() -> None:
    """(T, B, C) in and out, heads contiguous in the width as fairseq splits them."""
    attention = _attention().eval()
    x = torch.randn(11, 2, 16)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 8:] = True
    out, weights = attention(x, x, x, key_padding_mask=padding)
    heads = [
        project(x).view(11, 2, 4, 4).permute(1, 2, 0, 3)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    expected = flow_attention(*heads, causal=True, key_padding_mask=padding, query_padding_mask=padding)
    assert weights is None
    assert_close("out", out, attention.out_proj(expected.permute(2, 0, 1, 3).reshape(11, 2, 16)))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (dict(attn_mask=torch.zeros(5, 5)), "attn_mask"),
        (dict(static_kv=True), "static_kv"),
        (dict(need_weights=True), "need_weights"),
        (dict(key=torch.randn(5, 2, 16)), "self-attention"),
    ],
)
def test_refused_calls_name_the_cause(call, named: str) -> None:
    """What only a softmax over keys can do is a ValueError, never a different result."""
    with pytest.raises(ValueError, match=named):
        _attention()(torch.randn(5, 2, 16), **call)


def test_full_context_is_refused_by_the_model() -> None:
    """A causal decoder asked to see the future says so."""
    with pytest.raises(ValueError, match="full_context_alignment"):
        build_model("flowformer_lm")(tokens(1, 4), full_context_alignment=True)


def test_weights_of_a_language_model_can_be_recorded() -> None:
    """One record per layer, in order."""
    model = build_model("flowformer_lm").eval()
    with torch.no_grad(), record_attention(model) as records:
        model(tokens(2, 12))
    assert [record.name for record in records] == [f"decoder.layers.{i}.self_attn.inner" for i in range(2)]
    assert records[0].competition.shape == records[0].allocation.shape == (2, 4, 12)
