"""The adapter keeps fairseq's contract and refuses what it cannot honour."""

import pytest
import torch
from fairseq.modules import MultiheadAttention

from common.attention import FlowAttention, record_attention
from common.ops import flow_attention
from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention, LayerDesign
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.text import tokens


def _attention(**options) -> InnerMultiheadAttention:
    return InnerMultiheadAttention(16, 4, LayerDesign("flow"), causal=True, **options)


def test_parameters_are_those_of_fairseq() -> None:
    """So that stock and released checkpoints load."""
    stock = MultiheadAttention(16, 4, self_attention=True)
    assert {name: p.shape for name, p in _attention().named_parameters()} == {
        name: p.shape for name, p in stock.named_parameters()
    }


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


def test_attention_dropout_drops_sources_in_training_only() -> None:
    """--attention-dropout changes the training output, never the evaluation's."""
    attention = _attention(dropout=0.5)
    x = torch.randn(20, 2, 16)
    torch.manual_seed(0)
    first, second = (attention(x, x, x)[0] for _ in range(2))
    assert not torch.allclose(first, second)
    attention.eval()
    first, second = (attention(x, x, x)[0] for _ in range(2))
    assert torch.equal(first, second)


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--decoder-attention-heads", "5"], "--decoder-attention-heads is 5"),
        (["--flow-clamp", "-1"], "--flow-clamp is -1.0"),
        (["--flow-chunk-size", "0"], "--flow-chunk-size is 0"),
        (["--tokens-per-sample", "0"], "--tokens-per-sample is 0"),
        (["--max-target-positions", "-2"], "--max-target-positions is -2"),
        (["--decoder-xformers-att-config", "{'name': 'linformer'}"], "--decoder-xformers-att-config"),
    ],
)
def test_bad_options_are_named(arguments, named: str) -> None:
    """At construction, with what was given."""
    with pytest.raises(ValueError, match=named):
        build_model("flowformer_lm", *arguments)


def test_too_long_for_learned_positions() -> None:
    """Both lengths are named."""
    model = build_model("flowformer_lm", "--decoder-learned-pos", "--tokens-per-sample", "8")
    with pytest.raises(ValueError, match="9 tokens; allowed: 8, .*--max-target-positions.*--tokens-per-sample"):
        model(tokens(1, 9))


def test_flow_options_reach_the_attention() -> None:
    """Each flag changes the built module."""
    arguments = "--flow-form paper --flow-clamp 3 --flow-phi relu --flow-competition none --flow-allocation softmax"
    model = build_model("flowformer_lm", *arguments.split(), "--flow-chunk-size", "17")
    expected = dict(form="paper", clamp=3.0, phi="relu", competition="none", allocation="softmax", chunk_size=17)
    for layer in model.decoder.layers:
        inner = layer.self_attn.inner
        assert isinstance(inner, FlowAttention)
        assert {name: getattr(inner.options, name) for name in expected} == expected


def test_defaults_are_the_released_language_model() -> None:
    """Clamp 5, the authors' scaling, layers pre-norm; post-norm on request."""
    inner = build_model("flowformer_lm").decoder.layers[0].self_attn.inner
    assert (inner.options.form, inner.options.clamp, inner.causal) == ("released", 5.0, True)
    assert build_model("flowformer_lm").decoder.layers[0].normalize_before
    assert not build_model("flowformer_lm", "--lineartime-post-norm").decoder.layers[0].normalize_before


def test_weights_of_a_language_model_can_be_recorded() -> None:
    """One record per layer, in order."""
    model = build_model("flowformer_lm").eval()
    with torch.no_grad(), record_attention(model) as records:
        model(tokens(2, 12))
    assert [record.name for record in records] == [f"decoder.layers.{i}.self_attn.inner" for i in range(2)]
    assert records[0].competition.shape == records[0].allocation.shape == (2, 4, 12)
