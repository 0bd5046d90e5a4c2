"""The attention modules: by name, what all of them promise, and what each adds."""

import copy
import pickle
import re

import pytest
import torch

from common.attention import ATTENTIONS, FlowAttention, InnerAttention, LinearAttention, build_attention
from common.ops import flow_attention, flow_attention_map, flow_attention_weights, linear_attention
from tests.common.attention.build import REQUIRED, attend, build, extend, narrow
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
    known = ["combiner", "daft_conv", "daft_full", "flow", "linear", "mixed_chunk", "quadratic", "softmax"]
    with_parameters = ("combiner", "daft_conv", "daft_full", "mixed_chunk")
    assert list(ATTENTIONS) == known
    for name, kind in ATTENTIONS.items():
        module = build_attention(name, causal=True, **REQUIRED.get(name, {}))
        assert type(module) is kind and isinstance(module, InnerAttention) and module.causal
        assert not build_attention(name, **REQUIRED.get(name, {})).causal
        assert bool(list(module.parameters())) == (name in with_parameters) and not list(module.buffers())
        assert module.needs_input == (name == "combiner") and module.query
        assert module.key_channels == (1 if name == "daft_conv" else None)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match=r"attention is 'flows'; allowed: 'combiner', 'daft_conv', .*"):
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
        ("daft_full", "bias_dim", 0),
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


@names
@causality
def test_padded_queries_give_zero_and_padding_nothing(name, causal):
    clean, masks = qkv(19, d=4, e=4, dtype=torch.float32), masks_for(19, "both")
    mask = masks["key_padding_mask"][:, None, :, None]
    module = build(name, causal, torch.float32)
    for poison in (float("nan"), 1e9):
        poisoned = [x.detach().masked_fill(mask, poison).requires_grad_() for x in clean]
        out, expected = attend(module, *poisoned, **masks), attend(module, *clean, **masks)
        assert torch.equal(out, expected) and (out.masked_select(mask) == 0).all()
        found = gradients(out, [*poisoned, *module.parameters()])
        for actual, wanted in zip(found, gradients(expected, [*clean, *module.parameters()])):
            assert torch.equal(actual, wanted)
    nothing = dict.fromkeys(masks, torch.ones(2, 19, dtype=torch.bool))
    out = attend(module, *clean, **nothing)
    assert (out == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(out, [*clean, *module.parameters()]))


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "flow"])
@causality
def test_the_two_masks_are_not_mixed_up(name, causal):
    """A mask of queries hides outputs and nothing else, but in Flow-Attention, where sinks compete."""
    inputs, mask = qkv(19, d=4, e=4), padding("right", 2, 19)
    module = build(name, causal)
    whole, hidden = attend(module, *inputs), attend(module, *inputs, query_padding_mask=mask)
    assert torch.equal(hidden, whole.masked_fill(mask[:, None, :, None], 0.0))


@names
def test_extend_continues_what_forward_does_at_once(name):
    inputs, mask = qkv(21, d=4, e=4), padding("left", 2, 21)
    module = build(name, causal=True)
    leaves = [*inputs, *module.parameters()]
    for padding_mask in (None, mask):
        whole = attend(module, *inputs, key_padding_mask=padding_mask, query_padding_mask=padding_mask)
        outputs, state = [], None
        for part in torch.arange(21).split([5, 1, 1, 9, 1, 4]):
            piece_mask = None if padding_mask is None else padding_mask[:, part]
            out, state = extend(module, *(x[:, :, part] for x in inputs), padding_mask=piece_mask, state=state)
            outputs.append(out)
        out = torch.cat(outputs, dim=2)
        assert_close("out", out, whole)
        for i, (actual, wanted) in enumerate(zip(gradients(out, leaves), gradients(whole, leaves))):
            assert_close(f"gradient {i} of q, k, v and the parameters", actual, wanted)
        assert all(tensor.shape[0] == 2 for tensor in state.values())
        elements = sum(tensor.numel() for tensor in state.values())
        assert module.state_is_constant_size == (elements < 21 * 2 * 2 * 4)


@names
def test_extend_reorders_by_index_select(name):
    order = torch.tensor([1, 1, 0])
    module, first, second = build(name, causal=True), qkv(7, d=4, e=4), qkv(3, batch=3, d=4, e=4, seed=1)
    _, state = extend(module, *first)
    state = {key: tensor.index_select(0, order) for key, tensor in state.items()}
    out, _ = extend(module, *second, state=state)
    whole = attend(module, *(torch.cat([x.index_select(0, order), y], dim=2) for x, y in zip(first, second)))
    assert_close("out", out, whole[:, :, 7:])


@names
def test_extend_needs_causal(name):
    with pytest.raises(ValueError, match="causal is False; allowed for extend: .*causal=True"):
        extend(build(name), *qkv(3, d=4, e=4))


@names
def test_extend_refuses_a_wrong_state_or_mask(name):
    module, inputs = build(name, causal=True), qkv(3, d=4, e=4)
    _, state = extend(module, *inputs)
    wrong = [{}, {"k": 1}, [1], {key: tensor[:1] for key, tensor in state.items()}, {**state, "more": state}]
    wrong += [{key: tensor for key, tensor in state.items() if key != missing} for missing in state]
    wrong += [{**state, key: tensor[:1]} for key, tensor in state.items()]
    wrong += [{**state, key: tensor.to(torch.int16)} for key, tensor in state.items()]
    for given in wrong:
        with pytest.raises(ValueError, match="^initial_state.* allowed"):
            extend(module, *inputs, state=given)
    with pytest.raises(ValueError, match=r"padding_mask has shape \(2, 6\); allowed: .*\(2, 3\)"):
        extend(module, *inputs, padding_mask=torch.zeros(2, 6, dtype=torch.bool), state=state)
    with pytest.raises(ValueError, match="padding_mask has dtype torch.int64; allowed: torch.bool"):
        extend(module, *inputs, padding_mask=torch.zeros(2, 3, dtype=torch.long), state=state)


@names
@causality
def test_wrong_tensors_and_masks_are_refused(name, causal):
    module, (q, k, v) = build(name, causal), qkv(5, d=4, e=4)
    with pytest.raises(
        ValueError, match=r"^k has shape .* allowed: (the same batch, heads and channels|\(B, H, tokens, 1\))"
    ):
        attend(module, q, k[:, :1], v)
    with pytest.raises(ValueError, match="^key_padding_mask has dtype torch.int64; allowed: torch.bool"):
        attend(module, q, k, v, key_padding_mask=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^query_padding_mask has shape \(2, 4\); allowed: .*\(2, 5\)"):
        attend(module, q, k, v, query_padding_mask=torch.zeros(2, 4, dtype=torch.bool))


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
    options = {
        "combiner": {"num_heads": 2, "head_dim": 4, "row_length": 3, "rotary": False},
        "daft_conv": {
            "num_heads": 2, "window": 4, "query": True, "local_only": True, "reparameterize": False,
            "gumbel_temperature": None,
        },
        "daft_full": {"max_tokens": 20, "bias_dim": None, "query": True},
        "flow": FLOW_OPTIONS,
        "linear": {"phi": "relu", "chunk_size": 8},
        "mixed_chunk": {"num_heads": 2, "head_dim": 4, "chunk_size": 3, "kernel": "relu2", "rotary": False},
        "quadratic": {"kernel": "laplace", "divisor": 3.0},
        "softmax": {},
    }[name]  # fmt: skip
    module, inputs = build(name, causal=True, **options), qkv(19, d=4, e=4)
    expected = attend(module, *inputs)
    torch.save(module.state_dict(), tmp_path / "state")
    module.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(attend(other, *inputs), expected)
        assert repr(other) == repr(module)
    again = build(name, causal=True, **options)
    again.load_state_dict(module.state_dict())
    assert torch.equal(attend(again, *inputs), expected)
    printed = ", ".join(f"{key}={value!r}" for key, value in {"causal": True, **options}.items())
    lines = repr(module).splitlines()
    if name == "combiner":  # its layers are printed below
        assert lines[0] == f"{type(module).__name__}(" and lines[1].strip() == printed
    else:
        assert lines == [f"{type(module).__name__}({printed})"]


@names
def test_inputs_in_half_precision_give_half_precision_back(name):
    for dtype in (torch.bfloat16, torch.float16):
        inputs = qkv(19, d=4, e=4, dtype=dtype)
        module = build(name, causal=True, dtype=dtype)
        out = attend(module, *inputs, **masks_for(19))
        expected = attend(copy.deepcopy(module).float(), *(x.float() for x in inputs), **masks_for(19))
        assert out.dtype == dtype
        # Rotated queries and Combiner's projections are rounded to half precision on their way.
        rounded = name in ("combiner", "mixed_chunk")
        assert_close("out", out, expected, 8 * torch.finfo(dtype).eps if rounded else None)


@names
def test_autocast_takes_what_projections_under_it_give(name):
    """q, k and v in half precision, the module's parameters and a host's x in float32."""
    module, masks = build(name, causal=True, dtype=torch.float32), masks_for(19)
    halves = [x.detach().bfloat16() for x in qkv(19, d=4, e=4, scale=0.5)]
    more = {"x": halves[2].float().transpose(1, 2).flatten(2)} if module.needs_input else {}
    halves[1] = narrow(module, halves[1])
    expected = module(*(x.float() for x in halves), **masks, **more)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(*halves, **masks, **more)
        outputs, state = [], None
        for part in torch.arange(19).split([7, 1, 11]):
            some = {"x": more["x"][:, part]} if more else {}
            mask = masks["key_padding_mask"][:, part]
            piece, state = module.extend(*(x[:, :, part] for x in halves), padding_mask=mask, state=state, **some)
            outputs.append(piece)
    for actual in (out, torch.cat(outputs, dim=2)):
        assert actual.dtype == torch.bfloat16
        assert_close("out", actual, expected, 0.05 if name == "combiner" else 0.02)


@pytest.mark.parametrize("kind", [FlowAttention, LinearAttention])
def test_a_model_halved_as_fairseq_does_attends_in_float32_inside(kind):
    module, inputs = kind(causal=True).half(), qkv(2000, dtype=torch.float16)
    assert_close("out", module(*inputs), kind(causal=True)(*(x.double() for x in inputs)))
