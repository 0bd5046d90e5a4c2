"""Options and parameters of gated attention units; ``../test_contract.py`` runs the contract of attentions on them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.modules.forget_gate import FORGETS
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.norms import ScaleNorm
from common.modules.relative_bias import RotaryBias, ToeplitzBias
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.shared.reference_tools import rotated
from tests.common.inputs import padding
from tests.common.refusals import refused
from tests.compare import assert_close, gradients

FORMS = {"quad": {"chunk_size": None, "max_positions": 24}, "flash": {"chunk_size": 5}}
forms = pytest.mark.parametrize("form", FORMS)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def unit(form="flash", dtype=torch.float64, scale=0.5, **options) -> GatedAttentionUnit:
    """A unit of width 6, e 8 and s 4 whose parameters are all large enough to affect the output."""
    module = GatedAttentionUnit(6, expanded_dim=8, query_dim=4, **{**FORMS[form], **options})
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=scale, generator=generator)
    return module.to(dtype)


def tokens(n, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def in_pieces(module, x, pieces, mask=None):
    outputs, state = [], None
    for part in torch.arange(x.shape[1]).split(pieces):
        out, state = module.extend(x[:, part], None if mask is None else mask[:, part], state)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def assert_same(out, expected, module, x) -> None:
    """Compare outputs and the gradients of the input and of every parameter."""
    assert_close("out", out, expected)
    names, leaves = zip(("x", x), *module.named_parameters())
    for name, actual, wanted in zip(names, gradients(out, leaves), gradients(expected, leaves)):
        assert_close(f"gradient of {name}", actual, wanted)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("forget", FORGETS)
def test_the_sum_across_chunks_forgets_by_gates_of_the_normed_tokens(forget, heads):
    """The gates are the only difference from the unit without them."""
    module, x, mask = unit(causal=True, heads=heads, forget=forget, bias="none"), tokens(13), padding("left", 2, 13)
    plain = unit(causal=True, heads=heads, bias="none")
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if not name.startswith("forget_gate")})
    assert (module(x, mask) - plain(x, mask)).norm() > 1e-3 * plain(x, mask).norm()
    normal = F.layer_norm(x, (6,), module.norm.weight, module.norm.bias)
    u, v, z = F.silu(F.linear(normal, module.in_proj.weight, module.in_proj.bias)).split([8, 8, 4], -1)
    copies = [
        rotated(z[:, None] * gamma[:, None] + beta[:, None], mask) for gamma, beta in zip(module.gamma, module.beta)
    ]
    gates = module.forget_gate.reference(normal)
    values = v.unflatten(-1, (heads, -1)).transpose(1, 2)
    options = {"log_decay": gates, "key_padding_mask": mask}
    out = (
        mixed_chunk_attention_reference(*copies, values, chunk_size=5, causal=True, **options)
        .transpose(1, 2)
        .flatten(2)
    )
    expected = F.linear(u * out, module.out_proj.weight, module.out_proj.bias) + x
    real = ~mask[..., None]
    assert_same(module(x, mask)[real.expand_as(x)], expected[real.expand_as(x)], module, x)
    assert_close("in pieces", in_pieces(module, x, [5, 1, 7], mask)[0], module(x, mask))


def test_gates_remember_long_at_first_and_are_in_the_state_dict():
    module = GatedAttentionUnit(6, causal=True, forget="head", heads=2)
    assert not module.forget_gate.gate_proj.weight.any()
    decay = torch.sigmoid(module.forget_gate.gate_proj.bias)
    assert_close("kept", 1 / (1 - decay), torch.tensor([32.0, 1024.0]))
    assert "forget_gate.gate_proj.weight" in module.state_dict() and module.linear_cost
    assert not any("forget" in name for name in unit(causal=True).state_dict())


OPTIONS = {
    "causal": ({"causal": True}, FORMS),
    "chunk_size": ({"chunk_size": 3}, ["flash"]),
    "relu2 to laplace": ({"kernel": "laplace"}, FORMS),
    "relu2 to softmax": ({"kernel": "softmax"}, FORMS),
    "divisor": ({"divisor": 3.0}, ["quad"]),
    "local": ({"local": False}, ["flash"]),
    "linear": ({"linear": False}, ["flash"]),
    "rotary": ({"rotary": False}, FORMS),
    "first_softmax": ({"first_softmax": True}, FORMS),
    "first_to_all": ({"first_to_all": True}, ["flash"]),
    "heads": ({"heads": 2}, FORMS),
    "gate": ({"gate": False}, FORMS),
    "bias": ({"bias": "none"}, FORMS),
    "rotary bias": ({"bias": "rotary"}, FORMS),
    "norm": ({"norm": "scalenorm"}, FORMS),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_output_for_the_same_parameters(option):
    """Parameters shared with the plain unit are copied, so that only the option makes a difference."""
    change, names = OPTIONS[option]
    for form in names:
        plain, other, x = unit(form), unit(form, **change), tokens(13)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                source = dict(plain.named_parameters()).get(name)
                if source is not None and source.shape == parameter.shape:
                    parameter.copy_(source)
                elif source is not None and name.startswith("in_proj"):  # without a gate: V and Z of U, V and Z
                    parameter.copy_(source[-len(parameter) :])
                elif source is not None and name in ("gamma", "beta") and option == "heads":
                    parameter.copy_(source.expand_as(parameter))
                elif source is not None and name in ("gamma", "beta"):
                    parameter.copy_(source[: len(parameter)])
        if option == "heads":  # two equal heads would act as one; only V is split
            with torch.no_grad():
                other.gamma[:, 1] *= 2
        difference = (other(x) - plain(x)).norm() / plain(x).norm()
        assert difference > 1e-3, form


@causality
def test_max_positions_divides_what_is_causal_and_nothing_else(causal):
    """If not causal, the divisor is the row's number of real tokens; the shorter unit has the middle of the bias."""
    module, longer, x = unit("quad", causal=causal), unit("quad", causal=causal, max_positions=48), tokens(13)
    module.load_state_dict(longer.state_dict())
    assert torch.allclose(module(x), longer(x)) != causal
    same = unit("quad", causal=causal, max_positions=48, divisor=24.0 if causal else 13.0)
    same.load_state_dict(longer.state_dict())
    assert_close("out", same(x), module(x))


def test_parameters_of_the_papers_width():
    """d 768, e 1536, s 128: (d + 1)(2e + s) + (e + 1) d of the projections, γ and β, a bias and a norm."""

    def count(**options):
        return sum(x.numel() for x in GatedAttentionUnit(768, **options).parameters())

    dense, norm = 769 * (2 * 1536 + 128) + 1537 * 768, 2 * 768
    quad = {"chunk_size": None, "max_positions": 512}
    assert count(**quad) == dense + 2 * 2 * 128 + norm + 2 * 128
    assert count(**{**quad, "max_positions": 511}) == dense + 2 * 2 * 128 + norm + 2 * 511 - 1
    assert count() == dense + 2 * 4 * 128 + norm + 2 * 256 - 1
    assert count(chunk_size=512) == dense + 2 * 4 * 128 + norm + 2 * 128
    assert count(norm="scalenorm") == count() - norm + 1
    assert count(gate=False) == count() - 769 * 1536
    assert count(bias="none") == count() - 511
    assert count(heads=4) == count() + 3 * (2 * 4 * 128 + 511)
    assert count(linear=False) == count() - 2 * 2 * 128
    assert count(expanded_dim=768) == count() - 769 * 2 * 768 - 768 * 768
    assert count(query_dim=64) == count() - 769 * 64 - 2 * 4 * 64
    assert count(local=False) <= count() - 511, "no bias without the local term"


def test_parameters_start_as_in_the_paper():
    module = GatedAttentionUnit(768)
    for weight in (module.in_proj.weight, module.out_proj.weight, module.gamma, module.bias.weight):
        assert abs(weight.std() / 0.02 - 1) < 0.1 and abs(weight.mean()) < 2e-3
    for zero in (module.in_proj.bias, module.out_proj.bias, module.beta):
        assert (zero == 0).all()
    assert (module.norm.weight == 1).all() and (module.norm.bias == 0).all()
    assert (module.expanded_dim, module.query_dim, module.heads, module.chunk_size) == (1536, 128, 1, 256)
    assert module.kernel == "relu2" and module.gate and module.rotary and not module.causal
    nn.init.ones_(module.beta), nn.init.ones_(module.bias.weight), nn.init.ones_(module.out_proj.bias)
    module.reset_parameters()
    assert not module.beta.any() and not module.out_proj.bias.any() and abs(module.bias.weight.std() - 0.02) < 0.005


def test_norms_and_biases_by_name():
    assert type(GatedAttentionUnit(6).norm) is nn.LayerNorm
    assert type(GatedAttentionUnit(6, norm="scalenorm").norm) is ScaleNorm
    assert type(GatedAttentionUnit(6).bias) is ToeplitzBias
    assert type(GatedAttentionUnit(6, chunk_size=512).bias) is RotaryBias
    assert type(GatedAttentionUnit(6, chunk_size=512, bias="toeplitz").bias) is ToeplitzBias
    assert type(GatedAttentionUnit(6, bias="rotary").bias) is RotaryBias
    assert GatedAttentionUnit(6, bias="none").bias is None
    assert GatedAttentionUnit(6, chunk_size=None, max_positions=300).bias.max_positions == 300


@forms
def test_each_dropout_is_its_own_and_only_in_training(form):
    x = tokens(13)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        module = unit(form, **{name: 0.5})
        assert torch.equal(module.eval()(x), unit(form)(x))
        torch.manual_seed(3)
        dropped = module.train()(x)
        assert not torch.equal(dropped, module.eval()(x))
        branch, plain = dropped - x, module.eval()(x) - x
        if name == "dropout":  # entries of the branch, not of the residual
            share = branch / plain
            assert_close("share", share, (share > 1).double() * 2) and 0.3 < (share > 1).double().mean() < 0.7
    draws = []

    def layer(p):
        draws.append(p)
        return nn.Dropout(p)

    GatedAttentionUnit(6, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, dropout_layer=layer)
    assert sorted(draws) == [0.1, 0.2, 0.3]


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
        if poison == 1e9:  # the output at padding that the docstring promises
            assert_close("padding", module(x, mask)[mask], x[mask] + module.out_proj.bias)
        actual_gradient, expected_gradient = (
            gradients(outputs(leaf_input), [leaf_input])[0].masked_select(real) for leaf_input in (x, clean)
        )
        assert torch.equal(actual_gradient, expected_gradient)
        if poison == 1e9:  # a projection's own gradient multiplies by NaN inputs, as in any Transformer
            leaves = list(module.parameters())
            for actual, expected in zip(gradients(outputs(x), leaves), gradients(outputs(clean), leaves)):
                assert_close("gradient of a parameter", actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_inputs_stay_finite_in_half_precision(dtype):
    for causal in (False, True):
        module = GatedAttentionUnit(16, query_dim=8, chunk_size=64, causal=causal).to(dtype)
        out = module(torch.randn(1, 8192, 16).to(dtype))
        assert out.dtype == dtype and torch.isfinite(out).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(out, list(module.parameters())))


def test_flash_quad_of_several_blocks_compiles():
    """With more than 256 tokens, every block of rows is recomputed in the backward pass."""
    torch._dynamo.reset()
    x = tokens(300, batch=1, dtype=torch.float32)
    module = unit("quad", torch.float32, causal=True, max_positions=300)
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    expected = module(x)
    assert_close("out", out, expected)
    for actual, wanted in zip(gradients(out, [x, module.gamma]), gradients(expected, [x, module.gamma])):
        assert_close("gradient", actual, wanted)


REFUSED = [
    ({"expanded_dim": 0}, "expanded_dim", "0", "an integer of at least 1"),
    ({"query_dim": -4}, "query_dim", "-4", "an integer of at least 1"),
    ({"heads": 2.0}, "heads", "2.0", "an integer of at least 1"),
    ({"heads": 5}, "heads", "5", "a divisor of expanded_dim, 12"),
    ({"query_dim": 5}, "query_dim", "5", "an even number"),
    ({"query_dim": 5, "rotary": False, "bias": "rotary"}, "query_dim", "5", "an even number"),
    ({"kernel": "relu"}, "kernel", "'relu'", "'relu2', 'softmax', 'laplace'"),
    ({"bias": "t5"}, "bias", "'t5'", "'auto', 'toeplitz', 'rotary', 'none'"),
    ({"norm": "rms"}, "norm", "'rms'", "'layernorm', 'scalenorm'"),
    ({"dropout": 1.0}, "dropout", "1.0", "at least 0 and below 1"),
    ({"attention_dropout": -0.1}, "attention_dropout", "-0.1", "at least 0 and below 1"),
    ({"activation_dropout": 2}, "activation_dropout", "2", "at least 0 and below 1"),
    ({"chunk_size": 0}, "chunk_size", "0", "an integer of at least 1"),
    ({"chunk_size": 2.5}, "chunk_size", "2.5", "an integer of at least 1"),
    ({"chunk_size": None}, "max_positions", "None without chunk_size", "the longest training length"),
    ({"chunk_size": None, "max_positions": 0}, "max_positions", "0", "an integer of at least 1"),
    ({"chunk_size": None, "max_positions": 9, "local": False}, "local=False", "given", "with chunk_size"),
    ({"chunk_size": None, "max_positions": 9, "linear": False}, "linear=False", "given", "with chunk_size"),
    ({"chunk_size": None, "max_positions": 9, "first_to_all": True}, "first_to_all=True", "given", "with chunk_size"),
    ({"causal": True, "first_softmax": True}, "first_softmax=True", "given", "causal=False"),
    ({"causal": True, "first_to_all": True}, "first_to_all=True", "given", "causal=False"),
    ({"local": False, "linear": False}, "local=False", "given", "without linear=False"),
    ({"local": False, "first_softmax": True}, "local=False", "given", "first_softmax=True and first_to_all=True"),
    ({"local": False, "first_to_all": True}, "local=False", "given", "first_softmax=True and first_to_all=True"),
    ({"forget": "token", "causal": True}, "forget", "'token'", "'none', 'head', 'channel'"),
    ({"forget": "head"}, "forget", "'head'", "with causal=True and chunk_size"),
    ({"forget": "head", "causal": True, "linear": False}, "forget", "'head'", "without linear=False"),
    ({"forget": "head", "causal": True, "overlap": True}, "forget", "'head'", "overlap=True"),
    ({"forget": "head", "causal": True, "chunk_size": None, "max_positions": 9}, "forget", "'head'", "chunk_size"),
    ({"divisor": 4.0}, "divisor", "4.0", "without chunk_size, and without softmax"),
    ({"chunk_size": None, "max_positions": 9, "divisor": 0.0}, "divisor", "0.0", "above 0"),
    (
        {"chunk_size": None, "max_positions": 9, "divisor": 2.0, "kernel": "softmax"},
        "divisor",
        "2.0",
        "without softmax",
    ),
]


@pytest.mark.parametrize("options, argument, given, allowed", REFUSED, ids=lambda x: str(x) if type(x) is dict else "")
def test_options_that_are_not_allowed(options, argument, given, allowed):
    with refused(argument, given, allowed):
        GatedAttentionUnit(6, **options)


def test_a_width_is_at_least_1():
    with refused("dim", "0", "an integer of at least 1"):
        GatedAttentionUnit(0)


@forms
def test_inputs_masks_and_states_that_do_not_fit(form):
    module, x = unit(form, causal=True), tokens(5)
    for wrong in (x[0], x[..., 1:], x[None]):
        with refused("x", str(tuple(wrong.shape)), "(batch, tokens, 6)"):
            module(wrong)
    with refused("padding_mask", "torch.int64", "torch.bool"):
        module(x, torch.zeros(2, 5, dtype=torch.long))
    with refused("padding_mask", "(2, 4)", "(2, 5)"):
        module(x, torch.zeros(2, 4, dtype=torch.bool))
    with refused("padding_mask", "(2, 9)", "(2, 5)"):
        module.extend(x, torch.zeros(2, 9, dtype=torch.bool))
    _, state = module.extend(x)
    wrong = [{}, [1], {"k": 1}, {name: tensor[:1] for name, tensor in state.items()}, {**state, "more": x}]
    wrong += [{name: tensor for name, tensor in state.items() if name != missing} for missing in state]
    wrong += [{**state, name: tensor[:1]} for name, tensor in state.items()]
    wrong += [{**state, name: tensor.to(torch.int16)} for name, tensor in state.items()]
    for wrong_state in wrong:
        with pytest.raises(ValueError, match="^initial_state.* allowed"):
            module.extend(x, None, wrong_state)
    with refused("causal", "False", "extend: a unit built with causal=True"):
        unit(form).extend(x)


def test_a_toeplitz_bias_reaches_as_far_as_max_positions():
    module = unit("quad", causal=True, max_positions=8)
    assert module(tokens(8)).shape == (2, 8, 6)
    with refused("the input", "9 tokens", "by its relative bias: 8"):
        module(tokens(9))
    _, state = module.extend(tokens(8))
    with refused("the input", "9 tokens", "by its relative bias: 8"):
        module.extend(tokens(1), None, state)
    assert unit("quad", causal=True, max_positions=8, bias="rotary")(tokens(30)).shape == (2, 30, 6)


@causality
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_does_not_count_in_the_reach_of_a_toeplitz_bias(side, causal):
    x, mask = tokens(22, batch=3), padding(side, 3, 22)
    longest = int((~mask).sum(1).max())
    assert longest < 22
    module = unit("quad", causal=causal, max_positions=longest)
    out = module(x, mask)
    for b in range(3):
        assert_close(f"row {b}", out[b : b + 1, ~mask[b]], module(x[b : b + 1, ~mask[b]]), 1e-12)
    if causal:
        assert_same(in_pieces(module, x, [9, 1, 12], mask)[0], module(x, mask), module, x)
    with refused("the input", f"{longest} tokens", f"by its relative bias: {longest - 1}"):
        unit("quad", causal=causal, max_positions=longest - 1)(x, mask)
    assert (module(x, torch.ones_like(mask)) == x + module.out_proj.bias).all()


@forms
@causality
def test_separate_feed_forward(form, causal):
    """The unit without a gate, followed by x + silu(norm(x) W_1) W_2; also in pieces."""
    module = unit(form, causal=causal, gate=False, separate_ffn=True)
    x = tokens(11)
    plain = unit(form, causal=causal, gate=False)
    names = plain.state_dict().keys()
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if name in names})
    after, ffn = plain(x), module.ffn
    normed = F.layer_norm(after, (6,), ffn.norm.weight, ffn.norm.bias)
    inner = F.silu(F.linear(normed, ffn.in_proj.weight, ffn.in_proj.bias))
    assert inner.shape[-1] == module.expanded_dim
    assert_close("out", module(x), after + F.linear(inner, ffn.out_proj.weight, ffn.out_proj.bias))
    if causal:
        assert_close("in pieces", in_pieces(module, x, (3, 1, 7))[0], module(x))


def test_separate_feed_forward_is_instead_of_a_gate():
    with pytest.raises(ValueError, match="separate_ffn=True is given; allowed: with gate=False"):
        unit(separate_ffn=True)


@pytest.mark.parametrize("further", [{"overlap": True}, {"chunk_summaries": True}])
@pytest.mark.parametrize("bias", ["toeplitz", "rotary"])
def test_extra_terms_in_pieces(further, bias):
    """With overlapping chunks or chunk summaries, decoding equals the full pass; the state keeps tokens."""
    module, x = unit(causal=True, bias=bias, **further), tokens(13)
    out, expected = module(x), unit(causal=True, bias=bias)(x) if bias == "rotary" else None
    pieces, state = in_pieces(module, x, (6, 1, 1, 5), padding("none", 2, 13))
    assert_close("in pieces", pieces, out)
    assert state["k_quad"].shape[2] == 13 and not module.linear_cost
    assert expected is None or (out - expected).norm() > 1e-3 * expected.norm()


def test_extra_terms_are_remembered_and_of_chunks_alone():
    assert unit(overlap=True).stored_options()["overlap"] is True
    with pytest.raises(ValueError, match="chunk_summaries=True is given; allowed: with chunk_size"):
        unit("quad", chunk_summaries=True)
