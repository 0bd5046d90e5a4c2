"""The attention modules: by name, what all of them promise, and what each adds."""

import re

import pytest
import torch

from common.attention import ATTENTIONS, FlowAttention, InnerAttention, LinearAttention, build_attention
from common.ops import flow_attention, flow_attention_map, flow_attention_weights, linear_attention
from tests.common.attention.build import REQUIRED, SHAPE
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

FLOW_OPTIONS = {
    "form": "paper",
    "clamp": 5.0,
    "phi": "elu+1",
    "competition": "sigmoid",
    "allocation": "softmax",
    "chunk_size": 8,
}


def masks_for(tokens: int, side: str = "left") -> dict:
    return dict.fromkeys(("key_padding_mask", "query_padding_mask"), padding(side, 2, tokens))


def test_every_name_builds_its_module():
    for name, kind in ATTENTIONS.items():
        for causal, word in ((True, "causal"), (False, "bidirectional")):
            if word in kind.supports:
                module = build_attention(name, causal=causal, **SHAPE)
                assert type(module) is kind and isinstance(module, InnerAttention) and module.causal == causal


def test_a_module_prints_its_facts_and_options():
    module = build_attention("rfa", causal=True, **SHAPE, features=8, floor=0.5)
    facts = "causal=True, num_heads=2, head_dim=4"
    assert repr(module) == f"RfaAttention({facts}, features=8, floor=0.5, chunk_size=64)"


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match=r"attention is 'flows'; allowed: .*'combiner', .*'daft_conv', .*"):
        build_attention("flows")
    with pytest.raises(ValueError, match=r"attention 'linear' has no option 'clamp'; allowed: phi, chunk_size"):
        build_attention("linear", clamp=1.0)
    with pytest.raises(ValueError, match=r"attention 'softmax' has no option 'phi'; allowed"):
        build_attention("softmax", phi="relu")


@pytest.mark.parametrize(
    "name, option, given",
    [
        ("flow", "form", "letter"),
        ("flow", "clamp", -1),
        ("flow", "phi", "exp"),
        ("flow", "competition", "max"),
        ("flow", "allocation", "max"),
        ("flow", "chunk_size", 0),
        ("linear", "phi", "exp"),
        ("linear", "chunk_size", 1.5),
        ("quadratic", "kernel", "relu"),
        ("mixed_chunk", "kernel", "relu"),
        ("mixed_chunk", "num_heads", 0),
        ("mixed_chunk", "head_dim", 2.0),
        ("mixed_chunk", "head_dim", 5),
        ("mixed_chunk", "chunk_size", 0),
        ("combiner", "num_heads", 0),
        ("combiner", "head_dim", 5),
        ("combiner", "row_length", -1),
        ("daft_full", "max_tokens", 0),
        ("daft_full", "bias_dim", -1),
        ("daft_conv", "num_heads", 0),
        ("daft_conv", "window", 0),
        ("daft_conv", "window", 4),
        ("daft_conv", "window", (5, 4)),
        ("daft_conv", "window", (5, 5, 5)),
        ("daft_conv", "window", ()),
        ("daft_conv", "gumbel_temperature", 0.0),
        ("daft_conv", "gumbel_temperature", float("nan")),
    ],
)
def test_wrong_options_are_refused_when_the_module_is_built(name, option, given):
    with pytest.raises(ValueError, match="^" + re.escape(f"{option} is {given!r}; allowed") + ".*: "):
        build_attention(name, **{**REQUIRED.get(name, {}), option: given})


@causality
def test_flow_is_the_function_with_the_modules_options(causal):
    inputs = qkv(19)
    module = build_attention("flow", causal=causal, **FLOW_OPTIONS)
    expected = flow_attention(*inputs, causal=causal, **masks_for(19), **FLOW_OPTIONS)
    assert torch.equal(module(*inputs, **masks_for(19)), expected)
    for option in FLOW_OPTIONS.keys() - {"chunk_size", "clamp"}:  # the paper has no clamp
        default = {key: value for key, value in FLOW_OPTIONS.items() if key != option}
        assert not torch.allclose(build_attention("flow", causal=causal, **default)(*inputs), module(*inputs))
    clamped = build_attention("flow", causal=causal, clamp=0.5)(*inputs)
    assert torch.equal(clamped, flow_attention(*inputs, causal=causal, clamp=0.5))


@causality
def test_linear_is_the_function_with_the_modules_options(causal):
    inputs = qkv(19)
    module = build_attention("linear", causal=causal, phi="relu", chunk_size=8)
    expected = linear_attention(*inputs, causal=causal, phi="relu", chunk_size=8, **masks_for(19))
    assert torch.equal(module(*inputs, **masks_for(19)), expected)


@causality
def test_flow_shows_its_weights_and_its_map(causal):
    q, k, v = qkv(19)
    module, masks = build_attention("flow", causal=causal, **FLOW_OPTIONS), masks_for(19)
    expected = flow_attention_weights(q, k, causal=causal, **masks, **FLOW_OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(module.weights(q, k, **masks), expected))
    attention_map = flow_attention_map(q, k, causal=causal, **masks, **FLOW_OPTIONS)
    assert torch.equal(module.attention_map(q, k, **masks), attention_map)
    assert_close("map @ v", attention_map @ v, module(q, k, v, **masks))


@pytest.mark.parametrize("name", ["flow", "linear"])
@causality
def test_dropout_drops_whole_sources_and_keeps_the_mean(name, causal):
    q, k, v = qkv(40, batch=1, heads=1, e=4, dtype=torch.float64)
    v = torch.randn(1, 1, 40, 4, dtype=torch.float64)
    module = build_attention(name, causal=causal)
    plain = module(q, k, v)
    many = (x.detach().expand(2000, -1, -1, -1) for x in (q, k, v))
    mean = module(*many, dropout_p=0.25).mean(0, keepdim=True)
    assert_close("mean under dropout", mean[:, :, -1], plain[:, :, -1], 0.15)
    assert not torch.allclose(module(q, k, v, dropout_p=0.25), plain)
    assert torch.equal(module.eval()(q, k, v, dropout_p=0.0), plain)
    # One-hot values show each source's share: all of it or nothing, for every sink alike.
    identity = torch.eye(40, dtype=torch.float64)[None, None]
    share = module(q, k, identity, dropout_p=0.25)[0, 0, -1] / module(q, k, identity)[0, 0, -1]
    kept = share > 0.5
    assert_close("kept", share[kept], torch.full_like(share[kept], 1 / 0.75), 1e-6)
    assert (share[~kept] == 0).all() and 0 < kept.sum() < 40


@pytest.mark.parametrize("kind", [FlowAttention, LinearAttention])
def test_a_model_halved_as_fairseq_does_attends_in_float32_inside(kind):
    module, inputs = kind(causal=True).half(), qkv(2000, dtype=torch.float16)
    assert_close("out", module(*inputs), kind(causal=True)(*(x.double() for x in inputs)))
