"""The attention modules: by name, what all of them promise, and what each adds."""

import copy
import pickle

import pytest
import torch

from common.attention import ATTENTIONS, FlowAttention, InnerAttention, LinearAttention, build_attention
from common.ops import flow_attention, flow_attention_map, flow_attention_weights, linear_attention
from tests.common.inputs import padding, qkv
from tests.compare import assert_close, gradients

names = pytest.mark.parametrize("name", ATTENTIONS)
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
    assert list(ATTENTIONS) == ["flow", "linear", "softmax"]
    for name, kind in ATTENTIONS.items():
        module = build_attention(name, causal=True)
        assert type(module) is kind and isinstance(module, InnerAttention) and module.causal
        assert not build_attention(name).causal
        assert not list(module.parameters()) and not list(module.buffers())


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match=r"attention is 'flows'; allowed: 'flow', 'linear', 'softmax'"):
        build_attention("flows")
    with pytest.raises(ValueError, match=r"attention 'linear' has no option 'clamp'; allowed: causal, phi, chunk_size"):
        build_attention("linear", clamp=1.0)
    with pytest.raises(ValueError, match=r"attention 'softmax' has no option 'phi'; allowed: causal"):
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
    ],
)
def test_wrong_options_are_refused_when_the_module_is_built(name, option, given):
    with pytest.raises(ValueError, match=f"^{option} is {given!r}; allowed: "):
        build_attention(name, **{option: given})


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


@names
@causality
def test_padded_queries_give_zero_and_padding_nothing(name, causal):
    clean, masks = qkv(19, dtype=torch.float32), masks_for(19, "both")
    mask = masks["key_padding_mask"][:, None, :, None]
    module = build_attention(name, causal=causal)
    for poison in (float("nan"), 1e9):
        poisoned = [x.detach().masked_fill(mask, poison).requires_grad_() for x in clean]
        out, expected = module(*poisoned, **masks), module(*clean, **masks)
        assert torch.equal(out, expected) and (out.masked_select(mask) == 0).all()
        for actual, wanted in zip(gradients(out, poisoned), gradients(expected, clean)):
            assert torch.equal(actual, wanted)
    nothing = dict.fromkeys(masks, torch.ones(2, 19, dtype=torch.bool))
    out = module(*clean, **nothing)
    assert (out == 0).all() and all(torch.isfinite(gradient).all() for gradient in gradients(out, clean))


@names
def test_extend_continues_what_forward_does_at_once(name):
    inputs, mask = qkv(21), padding("left", 2, 21)
    module = build_attention(name, causal=True)
    for padding_mask in (None, mask):
        whole = module(*inputs, key_padding_mask=padding_mask, query_padding_mask=padding_mask)
        outputs, state = [], None
        for part in torch.arange(21).split([5, 1, 1, 9, 1, 4]):
            piece_mask = None if padding_mask is None else padding_mask[:, part]
            out, state = module.extend(*(x[:, :, part] for x in inputs), padding_mask=piece_mask, state=state)
            outputs.append(out)
        out = torch.cat(outputs, dim=2)
        assert_close("out", out, whole)
        for which, actual, wanted in zip("qkv", gradients(out, inputs), gradients(whole, inputs)):
            assert_close(f"gradient of {which}", actual, wanted)
        assert all(tensor.shape[0] == 2 for tensor in state.values())
        elements = sum(tensor.numel() for tensor in state.values())
        assert module.state_is_constant_size == (elements < 21 * 2 * 2 * 5)


@names
def test_extend_reorders_by_index_select(name):
    order = torch.tensor([1, 1, 0])
    module, first, second = build_attention(name, causal=True), qkv(7), qkv(3, batch=3, seed=1)
    _, state = module.extend(*first)
    state = {key: tensor.index_select(0, order) for key, tensor in state.items()}
    out, _ = module.extend(*second, state=state)
    whole = module(*(torch.cat([x.index_select(0, order), y], dim=2) for x, y in zip(first, second)))
    assert_close("out", out, whole[:, :, 7:])


@names
def test_extend_needs_causal(name):
    with pytest.raises(ValueError, match="causal is False; allowed for extend: .*causal=True"):
        build_attention(name).extend(*qkv(3))


@names
def test_extend_refuses_a_wrong_state_or_mask(name):
    module = build_attention(name, causal=True)
    _, state = module.extend(*qkv(3))
    for wrong in ({}, {"k": 1}, [1], {key: tensor[:1] for key, tensor in state.items()}):
        with pytest.raises(ValueError, match="^initial_state.* allowed"):
            module.extend(*qkv(3), state=wrong)
    with pytest.raises(ValueError, match=r"padding_mask has shape \(2, 6\); allowed: .*\(2, 3\)"):
        module.extend(*qkv(3), padding_mask=torch.zeros(2, 6, dtype=torch.bool), state=state)


@names
@causality
def test_wrong_tensors_and_masks_are_refused(name, causal):
    module, (q, k, v) = build_attention(name, causal=causal), qkv(5)
    with pytest.raises(ValueError, match=r"^k has shape .* allowed: the same batch, heads and channels"):
        module(q, k[:, :1], v)
    with pytest.raises(ValueError, match="^key_padding_mask has dtype torch.int64; allowed: torch.bool"):
        module(q, k, v, key_padding_mask=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^query_padding_mask has shape \(2, 4\); allowed: .*\(2, 5\)"):
        module(q, k, v, query_padding_mask=torch.zeros(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("name", ["flow", "linear"])
@causality
def test_dropout_drops_whole_sources_and_keeps_the_mean(name, causal):
    q, k, v = qkv(40, batch=1, heads=1, e=4, dtype=torch.float64)
    v = torch.randn(1, 1, 40, 4, dtype=torch.float64)
    module = build_attention(name, causal=causal)
    plain = module(q, k, v)
    mean = sum(module(q, k, v, dropout_p=0.25) for _ in range(2000)) / 2000
    assert_close("mean under dropout", mean[:, :, -1], plain[:, :, -1], 0.15)
    assert not torch.allclose(module(q, k, v, dropout_p=0.25), plain)
    assert torch.equal(module.eval()(q, k, v, dropout_p=0.0), plain)
    # One-hot values show each source's share: all of it or nothing, for every sink alike.
    identity = torch.eye(40, dtype=torch.float64)[None, None]
    share = module(q, k, identity, dropout_p=0.25)[0, 0, -1] / module(q, k, identity)[0, 0, -1]
    kept = share > 0.5
    assert_close("kept", share[kept], torch.full_like(share[kept], 1 / 0.75), 1e-6)
    assert (share[~kept] == 0).all() and 0 < kept.sum() < 40


@names
def test_modules_copy_pickle_and_print_their_options(name, tmp_path):
    options = {"flow": FLOW_OPTIONS, "linear": {"phi": "relu", "chunk_size": 8}, "softmax": {}}[name]
    module, inputs = build_attention(name, causal=True, **options), qkv(19)
    expected = module(*inputs)
    torch.save(module.state_dict(), tmp_path / "state")
    module.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*inputs), expected)
        assert repr(other) == repr(module)
    printed = ", ".join(f"{key}={value!r}" for key, value in {"causal": True, **options}.items())
    assert repr(module) == f"{type(module).__name__}({printed})"


@names
def test_inputs_in_half_precision_give_half_precision_back(name):
    for dtype in (torch.bfloat16, torch.float16):
        inputs = qkv(19, dtype=dtype)
        out = build_attention(name, causal=True)(*inputs, **masks_for(19))
        expected = build_attention(name, causal=True)(*(x.float() for x in inputs), **masks_for(19))
        assert out.dtype == dtype
        assert_close("out", out, expected)


@pytest.mark.parametrize("kind", [FlowAttention, LinearAttention])
def test_a_model_halved_as_fairseq_does_attends_in_float32_inside(kind):
    module, inputs = kind(causal=True).half(), qkv(2000, dtype=torch.float16)
    assert_close("out", module(*inputs), kind(causal=True)(*(x.double() for x in inputs)))
