"""Options, parameters, dropout, memory and packed documents of gated attention units.

``../test_own.py`` runs the contract of attentions on them: their literal formula, padding, states, half precision.
"""

import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.modules import gated_attention_unit
from common.modules.forget_gate import FORGETS
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.norms import ScaleNorm
from common.modules.relative_bias import RotaryBias, ToeplitzBias
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.shared.reference_tools import rotated
from tests.common.inputs import padding
from tests.compare import assert_all_close, assert_close, gradients

QUAD, FLASH = {"chunk_size": None, "max_positions": 24}, {"chunk_size": 5}
FORMS = {"quad": QUAD, "flash": FLASH}
forms = pytest.mark.parametrize("form", FORMS)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def unit(form: str = "flash", dtype: torch.dtype = torch.float64, **options) -> GatedAttentionUnit:
    """A unit of width 6, e 8 and s 4 whose parameters are all large enough to affect the output."""
    module = GatedAttentionUnit(6, expanded_dim=8, query_dim=4, **{**FORMS[form], **options})
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.to(dtype)


def tokens(n: int = 13, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def in_pieces(module, x, pieces, mask=None, ids=None) -> tuple[Tensor, dict]:
    """The outputs of pieces of these lengths one after another, and the state after them."""
    outputs, state = [], None
    for part in torch.arange(x.shape[1]).split(pieces):
        some_mask, some_ids = (None if y is None else y[:, part] for y in (mask, ids))
        out, state = module.extend(x[:, part], some_mask, state, some_ids)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def assert_same(out, expected, module, x) -> None:
    """Compare outputs and the gradients of the input and of every parameter."""
    assert_close("out", out, expected)
    named = {"x": x, **dict(module.named_parameters())}
    assert_all_close(named, gradients(out, named.values()), gradients(expected, named.values()))


@pytest.mark.parametrize("forget, heads", [("head", 2), ("channel", 1), ("channel", 2)])
def test_the_sum_across_chunks_forgets_by_gates_of_the_normed_tokens(forget, heads):
    """Literally, with padding whose values, even NaN, reach no gradient."""
    module, x, mask = unit(causal=True, heads=heads, forget=forget, bias="none"), tokens(), padding("left", 2, 13)
    normal = F.layer_norm(x, (6,), module.norm.weight, module.norm.bias)
    u, v, z = F.silu(F.linear(normal, module.in_proj.weight, module.in_proj.bias)).split([8, 8, 4], -1)
    copies = [rotated(z[:, None] * g[:, None] + b[:, None], mask) for g, b in zip(module.gamma, module.beta)]
    options = {"log_decay": module.forget_gate.reference(normal), "key_padding_mask": mask, "chunk_size": 5}
    values = v.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = mixed_chunk_attention_reference(*copies, values, causal=True, **options).transpose(1, 2).flatten(2)
    expected = F.linear(u * out, module.out_proj.weight, module.out_proj.bias) + x
    real = ~mask[..., None].expand_as(x)
    assert_same(module(x, mask)[real], expected[real], module, x)
    assert_close("in pieces", in_pieces(module, x, [5, 1, 7], mask)[0], module(x, mask))
    loud = x.detach().masked_fill(mask[..., None], math.nan)
    gate = list(module.forget_gate.parameters())
    for actual, wanted in zip(gradients(module(loud, mask)[real], gate), gradients(module(x, mask)[real], gate)):
        assert_close("gradient of a gate beside NaN in padding", actual, wanted)


#: Options, and the forms that have them.
OPTIONS = [
    *(({name: value}, form) for name, value in {"causal": True, "rotary": False, "heads": 2}.items() for form in FORMS),
    *(({"kernel": kernel}, form) for kernel in ("laplace", "softmax") for form in FORMS),
    *(({"bias": bias}, form) for bias in ("none", "rotary") for form in FORMS),
    *(({name: value}, form) for name, value in {"gate": False, "norm": "scalenorm"}.items() for form in FORMS),
    *(({"first_softmax": True}, form) for form in FORMS),
    *(({name: False}, "flash") for name in ("local", "linear")),
    *(({name: True}, "flash") for name in ("first_to_all", "overlap", "chunk_summaries")),
    ({"chunk_size": 3}, "flash"),
    ({"divisor": 3.0}, "quad"),
]


@torch.no_grad()
def test_every_option_changes_the_output_for_the_same_parameters():
    """Parameters shared with the plain unit are copied, so that only the option makes a difference."""
    for change, form in OPTIONS:
        shared = {"bias": "none"} if change.keys() & {"overlap", "chunk_size"} else {}
        plain, other, x = unit(form, **shared), unit(form, **{**shared, **change}), tokens()
        sources = dict(plain.named_parameters())
        for name, parameter in other.named_parameters():
            if name in sources and sources[name].shape == parameter.shape:
                parameter.copy_(sources[name])
        assert (other(x) - plain(x)).norm() > 1e-3 * plain(x).norm(), (change, form)


@causality
def test_max_positions_divides_what_is_causal_and_nothing_else(causal):
    """If not causal, the divisor is the row's number of real tokens; the shorter unit has the middle of the bias."""
    module, longer, x = unit("quad", causal=causal), unit("quad", causal=causal, max_positions=48), tokens()
    module.load_state_dict(longer.state_dict())
    assert torch.allclose(module(x), longer(x)) != causal
    same = unit("quad", causal=causal, max_positions=48, divisor=24.0 if causal else 13.0)
    same.load_state_dict(longer.state_dict())
    assert_close("out", same(x), module(x))


def test_parameters_begin_as_in_the_paper():
    """Weights are normal with deviation 0.02, and biases 0."""
    module = GatedAttentionUnit(768, causal=True, forget="head", heads=2)
    for weight in (module.in_proj.weight, module.out_proj.weight, module.gamma, module.bias.weight):
        assert abs(weight.std() / 0.02 - 1) < 0.1 and abs(weight.mean()) < 2e-3
    for zero in (module.in_proj.bias, module.out_proj.bias, module.beta):
        assert (zero == 0).all()
    decay = torch.sigmoid(module.forget_gate.gate_proj.bias)
    assert_close("kept", 1 / (1 - decay), torch.tensor([32.0, 1024.0]))
    kinds = {511: ToeplitzBias, 512: RotaryBias}
    assert all(type(GatedAttentionUnit(6, chunk_size=size).bias) is kind for size, kind in kinds.items())
    assert type(GatedAttentionUnit(6, norm="scalenorm").norm) is ScaleNorm


@forms
def test_each_dropout_is_its_own_and_only_in_training(form):
    x, probabilities = tokens(), []
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        module = unit(form, **{name: 0.5})
        plain = module.eval()(x) - x
        assert torch.equal(module.eval()(x), unit(form)(x))
        branch = module.train()(x) - x
        assert not torch.equal(branch, plain)
        if name == "dropout":  # entries of the branch, not of the residual
            kept = (branch / plain > 1).double()
            assert_close("share", branch / plain, 2 * kept, 1e-6)
            assert 0.3 < kept.mean() < 0.7
    options = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    GatedAttentionUnit(6, **options, dropout_layer=lambda p: probabilities.append(p) or nn.Dropout(p))
    assert sorted(probabilities) == [0.1, 0.2, 0.3]


def test_attention_dropout_drops_whole_sources():
    """In chunks of one token without a linear term, each source has one sink: its value is dropped or doubled."""
    module, x = unit(chunk_size=1, linear=False, attention_dropout=0.5), tokens(40)
    plain = module.eval()(x) - x - module.out_proj.bias
    share = (module.train()(x) - x - module.out_proj.bias) / plain
    for row in share:
        is_kept = row.mean(-1, keepdim=True) > 1
        assert_close("share", row, 2.0 * is_kept.double().expand_as(row), 1e-6)
        assert 0.2 < is_kept.double().mean() < 0.8
    assert not torch.equal(share[0] > 1, share[1] > 1)


@forms
@causality
def test_what_stands_in_padding_does_not_reach_real_tokens(causal, form):
    module, clean, mask = unit(form, causal=causal), tokens(22, batch=3), padding("all", 3, 22)
    real = ~mask[..., None]

    def outputs(x):
        return module(x, mask).masked_select(real)

    for poison in (1e9, math.nan, math.inf):
        x = clean.detach().masked_fill(mask[..., None], poison).requires_grad_()
        assert torch.equal(outputs(x), outputs(clean))
        actual, expected = (gradients(outputs(leaf), [leaf])[0].masked_select(real) for leaf in (x, clean))
        assert torch.equal(actual, expected)
        if poison == 1e9:  # the output at padding that the docstring promises
            assert_close("padding", module(x, mask)[mask], x[mask] + module.out_proj.bias)


@causality
@pytest.mark.parametrize("side", ["left", "holes"])
def test_padding_does_not_count_in_the_reach_of_a_toeplitz_bias(side, causal):
    x, mask = tokens(22, batch=3), padding(side, 3, 22)
    longest = int((~mask).sum(1).max())
    module = unit("quad", causal=causal, max_positions=longest)
    out = module(x, mask)
    for b in range(3):
        assert_close(f"row {b}", out[b : b + 1, ~mask[b]], module(x[b : b + 1, ~mask[b]]), 1e-12)
    if causal:
        assert_same(in_pieces(module, x, [9, 1, 12], mask)[0], module(x, mask), module, x)
    with pytest.raises(ValueError, match=f"the input has {longest} tokens; allowed.*: {longest - 1}"):
        unit("quad", causal=causal, max_positions=longest - 1)(x, mask)
    assert unit("quad", causal=causal, max_positions=8, bias="rotary")(x).shape == x.shape


@forms
@causality
def test_separate_feed_forward(form, causal):
    """The unit without a gate, followed by x + silu(norm(x) W_1) W_2; also in pieces."""
    options = {"causal": causal, "gate": False}
    module, plain, x = unit(form, separate_ffn=True, **options), unit(form, **options), tokens(11)
    names = plain.state_dict().keys()
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if name in names})
    after, ffn = plain(x), module.ffn
    normed = F.layer_norm(after, (6,), ffn.norm.weight, ffn.norm.bias)
    inner = F.silu(F.linear(normed, ffn.in_proj.weight, ffn.in_proj.bias))
    assert_close("out", module(x), after + F.linear(inner, ffn.out_proj.weight, ffn.out_proj.bias))
    if causal:
        assert_close("in pieces", in_pieces(module, x, (3, 1, 7))[0], module(x))


# Memory: a unit recomputes what it did not save for the backward pass, which changes nothing else.

RECOMPUTED = {
    "flash": {**FLASH, "causal": True},
    "quad": QUAD,
    "no gate, one term": {**FLASH, "causal": True, "gate": False, "linear": False},
    "forget": {**FLASH, "causal": True, "forget": "head"},
    "dropout": {**FLASH, "dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
}


def step(module: GatedAttentionUnit, x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many tensors the graph keeps outside of the recomputed part."""
    saved = []
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = module(x, mask)
    torch.manual_seed(7)  # dropout must be that of the forward pass
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])], len(saved)


@pytest.mark.parametrize("options", RECOMPUTED)
def test_recomputing_gives_the_same_bit_for_bit(options, monkeypatch):
    """In several dtypes, with padding, and under autocast."""
    for dtype, side, autocast in (
        (torch.float64, "none", False),
        (torch.bfloat16, "holes", False),
        (torch.float32, "left", True),
    ):
        module, x, mask = unit(dtype=dtype, **RECOMPUTED[options]), tokens(dtype=dtype), padding(side, 2, 13)
        results = []
        for recomputed_from in (0, sys.maxsize):
            monkeypatch.setattr(gated_attention_unit, "RECOMPUTED_FROM", recomputed_from)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                results.append(step(module, x, mask))
        (recomputed, few), (plain, many) = results
        assert all(torch.equal(actual, expected) for actual, expected in zip(recomputed, plain, strict=True))
        assert few < 5 < 20 < many


@forms
def test_gradients_of_second_order_and_of_frozen_parameters(form, monkeypatch):
    monkeypatch.setattr(gated_attention_unit, "RECOMPUTED_FROM", 0)
    module, x = unit(form, causal=True, **({"chunk_size": 2} if form == "flash" else {})), tokens(3, batch=1)
    assert torch.autograd.gradgradcheck(module, x, atol=1e-4)
    wanted = torch.autograd.grad(module(x).square().sum(), [x, module.gamma])
    module.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), x)[0], wanted[0])
    module.gamma.requires_grad_()
    (actual,) = torch.autograd.grad(module(x.detach()).square().sum(), module.gamma)
    assert_close("gradient of gamma", actual, wanted[1])


@forms
@causality
def test_autocast_is_accurate_at_many_tokens(causal, form):
    """To 1e-2, from bfloat16 tokens, forward and backward; without chunks at fewer tokens."""
    n, options = (
        (16384, {"chunk_size": 256}) if form == "flash" else (1024, {"chunk_size": None, "max_positions": 1024})
    )
    module = GatedAttentionUnit(8, expanded_dim=16, query_dim=8, causal=causal, **options)
    half = torch.randn(1, n, 8).bfloat16().requires_grad_()
    wide = half.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(half)
    expected = module(wide)
    assert_close("out", out.float(), expected, 1e-2)
    assert_close("last tokens", out[:, -100:].float(), expected[:, -100:], 1e-2)
    # Gradients of the norm are sums of rounded numbers that cancel, as in any layer under autocast.
    named = {name: x for name, x in module.named_parameters() if not name.startswith("norm")}
    actual = gradients(out, [half, *named.values()])
    wanted = gradients(expected, [wide, *named.values()])
    assert_close("gradient of x", actual[0].float(), wanted[0], 1e-2)
    assert_all_close(named, actual[1:], wanted[1:], 3e-2)


def test_long_inputs_stay_finite_in_float16():
    for causal in (False, True):
        module = GatedAttentionUnit(16, query_dim=8, chunk_size=64, causal=causal).half()
        out = module(torch.randn(1, 4096, 16).half())
        assert out.dtype == torch.float16 and torch.isfinite(out).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(out, list(module.parameters())))


def test_flash_quad_of_several_blocks_compiles():
    """With more than 256 tokens, every block of rows is recomputed in the backward pass."""
    torch._dynamo.reset()
    x, module = tokens(300, batch=1, dtype=torch.float32), unit("quad", torch.float32, causal=True, max_positions=300)
    out, expected = torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x)
    assert_close("out", out, expected)
    for actual, wanted in zip(gradients(out, [x, module.gamma]), gradients(expected, [x, module.gamma])):
        assert_close("gradient", actual, wanted)


# Packed documents

LENGTHS = ((1, 4, 5, 6, 8), (12, 1, 11))
IDS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
PACKED = {
    "flash": {},
    "flash, softmax": {"kernel": "softmax", "heads": 2},
    "flash, overlap and summaries": {"overlap": True, "chunk_summaries": True},
    "quadratic, toeplitz": {"chunk_size": None, "max_positions": 12, "bias": "toeplitz"},
    "quadratic, rotary": {"chunk_size": None, "max_positions": 24, "bias": "rotary", "heads": 2},
    "separate": {"gate": False, "separate_ffn": True, "rotary": False},
    **{f"flash, forget by {forget}": {"forget": forget, "causal": True} for forget in FORGETS},
}


def alone(module: GatedAttentionUnit, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run each document by itself."""
    rows = []
    for b, lengths in enumerate(LENGTHS):
        parts = torch.arange(24).split(list(lengths))
        row = [module(x[b : b + 1, part], None if mask is None else mask[b : b + 1, part]) for part in parts]
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows)


@causality
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_as_rows_of_their_own(name, causal):
    """With gradients, with padding, and in pieces and steps."""
    module, x, mask = unit(**{"causal": causal, **PACKED[name]}), tokens(24), torch.arange(24).expand(2, -1) % 7 == 3
    out = module(x, segment_ids=IDS)
    assert_same(out, alone(module, x), module, x)
    assert_close("with padding", module(x, mask, segment_ids=IDS)[~mask], alone(module, x, mask)[~mask])
    for parts in ([1] * 24, [7, 1, 9, 7]) if module.causal else ():
        assert_close("in pieces", in_pieces(module, x, parts, ids=IDS)[0], out)


# Refusals

LONG, CAUSAL = {"chunk_size": None, "max_positions": 9}, {"causal": True}
REFUSED = [
    ({"dim": 0}, "dim is 0", "at least 1"),
    ({"expanded_dim": 0}, "expanded_dim is 0", "at least 1"),
    ({"heads": 2.0}, "heads is 2.0", "an integer"),
    ({"heads": 5}, "heads is 5", "a divisor of expanded_dim, 12"),
    ({"query_dim": 5}, "query_dim is 5", "an even number"),
    ({"query_dim": 5, "rotary": False, "bias": "rotary"}, "query_dim is 5", "an even number"),
    ({"kernel": "relu"}, "kernel is 'relu'", "'relu2', 'softmax', 'laplace'"),
    ({"bias": "t5"}, "bias is 't5'", "'auto', 'toeplitz', 'rotary', 'none'"),
    ({"norm": "rms"}, "norm is 'rms'", "'layernorm', 'scalenorm'"),
    ({"dropout": 1.0}, "dropout is 1.0", "below 1"),
    ({"attention_dropout": -0.1}, "attention_dropout is -0.1", "at least 0"),
    ({"activation_dropout": 2}, "activation_dropout is 2", "below 1"),
    ({"chunk_size": 2.5}, "chunk_size is 2.5", "an integer of at least 1"),
    ({"chunk_size": None}, "max_positions is None", "the longest training length"),
    ({**LONG, "max_positions": 0}, "max_positions is 0", "an integer of at least 1"),
    *(
        ({**LONG, name: name == "first_to_all"}, name, "with chunk_size")
        for name in ("local", "linear", "first_to_all")
    ),
    ({**LONG, "chunk_summaries": True}, "chunk_summaries=True", "with chunk_size"),
    *(({**CAUSAL, name: True}, f"{name}=True", "causal=False") for name in ("first_softmax", "first_to_all")),
    ({"local": False, "linear": False}, "local=False", "without linear=False"),
    *(({"local": False, name: True}, "local=False", "first_to_all=True") for name in ("first_softmax", "first_to_all")),
    ({"forget": "token", **CAUSAL}, "forget is 'token'", "'none', 'head', 'channel'"),
    ({"forget": "head"}, "forget is 'head'", "with causal=True and chunk_size"),
    *(({"forget": "head", **CAUSAL, **x}, "forget", "without") for x in ({"linear": False}, {"overlap": True}, LONG)),
    ({"divisor": 4.0}, "divisor is 4.0", "without chunk_size, and without softmax"),
    ({**LONG, "divisor": 0.0}, "divisor is 0.0", "above 0"),
    ({**LONG, "divisor": 2.0, "kernel": "softmax"}, "divisor is 2.0", "without softmax"),
    ({"separate_ffn": True}, "separate_ffn=True", "with gate=False"),
]


def test_what_is_not_allowed():
    """Options, inputs, masks, and more tokens than the bias has entries for."""
    for options, given, allowed in REFUSED:
        with pytest.raises(ValueError, match=f"^{given}.*allowed.*{allowed}"):
            GatedAttentionUnit(**{"dim": 6, **options})
    for form in FORMS:
        module, x = unit(form, causal=True), tokens(5)
        for wrong in (x[0], x[..., 1:], x[None]):
            with pytest.raises(ValueError, match=r"^x has shape .*allowed: \(batch, tokens, 6\)"):
                module(wrong)
        for wrong in (torch.zeros(2, 5).long(), torch.zeros(2, 4).bool(), torch.zeros(2, 9).bool()):
            for call in (module, module.extend):
                with pytest.raises(ValueError, match="^padding_mask .*allowed"):
                    call(x, wrong)
        with pytest.raises(ValueError, match="causal is False; allowed for extend: a unit built with causal=True"):
            unit(form).extend(x)
    module = unit("quad", causal=True)
    full = module.extend(tokens(24))[1]
    with pytest.raises(ValueError, match="the input has 25 tokens; allowed by its relative bias: 24"):
        module.extend(tokens(1), None, full)
