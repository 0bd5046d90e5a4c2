"""Single mechanisms, gates, convolutions and positions, beyond the contract, which knows their formulas."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import scipy.stats
import torch
from torch import nn
from torch.nn import functional as F

from common.attention import (
    ATTENTIONS,
    DaftConvAttention,
    ForgetAttention,
    InnerAttention,
    LinearAttention,
    RotaryAttention,
    ShortConvAttention,
    build_attention,
    options_of,
    position_entropy,
)
from common.modules.forget_gate import FORGETS, ForgetGate
from common.modules.short_conv import ShortConv
from common.ops import linear_attention, mixed_chunk_attention
from common.ops.favor import favor_attention
from common.ops.favor.reference import favor_attention_reference
from tests.common.contract.mechanisms import CHANNELS, HEADS, Case, at, both, counts, run_in_parts, tensors
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

causal_names = [name for name, kind in ATTENTIONS.items() if "causal" in kind.supports]
constant = [name for name in causal_names if ATTENTIONS[name].linear_cost]
forgetting = [name for name in causal_names if "forget" in ATTENTIONS[name].supports]
SHAPE = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 24}


def build(name: str, causal: bool = False, **options) -> InnerAttention:
    """Build the attention with parameters large enough to affect the output."""
    module = build_attention(name, causal=causal, **{**SHAPE, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


# Single mechanisms


def test_softmax_drops_entries_of_the_map():
    q, k, _ = qkv(30, e=1)
    identity = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    attention = build_attention("softmax")
    share = attention(q, k, identity, dropout_p=0.5) / attention(q, k, identity)
    is_kept = share > 1.0
    assert_close("share", share, 2.0 * is_kept.double())
    assert 0.4 < is_kept.double().mean() < 0.6
    assert torch.equal(attention(q, k, identity), attention(q, k, identity, dropout_p=0.0))


def test_rates_and_steps_of_the_delta_rule_begin_as_the_authors_have_them():
    """Rates are uniform up to 16, steps log-uniform from 0.001 to 0.1: checks means and extremes over 4,000 heads."""
    options = {"output_norm": "none", "output_gate": "none"}
    module = build_attention("gated_delta", True, num_heads=4000, head_dim=1, **options)
    rate, step = module.A_log.detach().exp(), F.softplus(module.dt_bias.detach()).log10()
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() <= 16 and abs(rate.mean() - 8) < 0.3
    assert -3 <= step.min() + 1e-4 and step.max() <= -1 + 1e-4 and abs(step.mean() + 2) < 0.05


@torch.no_grad()
def test_torchscript_takes_masks_of_flow_and_refuses_those_of_daft():
    """A batch of images of several sizes has masks."""
    module, masks = build_attention("flow"), (padding("right", 2, 17), padding("left", 2, 11))
    inputs = qkv(11, 17)
    assert_close("out", torch.jit.script(module)(*inputs, *masks), module(*inputs, *masks))
    for name in ("daft_conv", "daft_full"):
        module, mask = Case(name, False, image=True).build(), torch.zeros(2, 21, dtype=torch.bool)
        with pytest.raises(torch.jit.Error, match="mask"):
            torch.jit.script(module)(**tensors(module, 21, grad=False), key_padding_mask=mask)


def test_daft_conv_attends_by_keys_alone_at_first():
    for options in ({"window": (11, 11)}, {"window": 7, "reparameterize": False}, {"causal": True}):
        assert (build_attention("daft_conv", num_heads=64, **options).position_bias() == 0).all()
    assert DaftConvAttention(num_heads=1, window=[3, 5]).r.shape == (1, 3, 5), "a pair from a command line"


def test_a_sample_of_gumbel_softmax_is_over_the_whole_window_of_an_image():
    """The reference draws one literally; each call has another."""
    module = build("daft_conv", window=(3, 5), gumbel_temperature=0.5, spatial_dims=2).train()
    inputs, outputs = tensors(module, 12, grad=False), []
    for call in (module, module.reference):
        torch.manual_seed(3)
        outputs.append(call(**inputs))
    assert_close("out", *outputs)
    assert not torch.equal(module(**inputs), outputs[0])


@pytest.mark.parametrize("options", [{}, {"reparameterize": False}, {"gumbel_temperature": 0.5}], ids=str)
@pytest.mark.parametrize("window", [5, (3, 7)], ids=str)
def test_the_entropy_of_a_module(window, options):
    module = build("daft_conv", num_heads=3, window=window, **options)
    flat = module.position_bias().detach().flatten(1)
    assert module.entropy().item() == pytest.approx(scipy.stats.entropy(flat.exp().numpy(), axis=1).sum())
    assert all((x != 0).any() for x in torch.autograd.grad(module.entropy(), [module.r]))
    module.reset_parameters()
    assert module.entropy().item() == pytest.approx(3 * math.log(flat.shape[1])), "no place is preferred at first"
    with torch.no_grad():
        module.r.zero_().view(3, -1)[:, 1] = 1e5
        if module.options.reparameterize:
            module.gamma.fill_(1e5)
    assert module.entropy().item() == pytest.approx(0.0, abs=1e-6)


def test_the_entropy_of_a_model_is_the_sum_over_its_modules():
    first, second = build("daft_conv", window=5), build("daft_conv", num_heads=3, window=(3, 3))
    model = nn.Sequential(first, nn.Sequential(build("daft_full"), second))
    assert_close("entropy", position_entropy(model), first.entropy() + second.entropy())
    position_entropy(model).backward()
    assert all((module.gamma.grad != 0).all() for module in (first, second))


# Gates


def test_gates_are_for_running_sums_and_convolutions_for_constant_states():
    assert set(forgetting) == {"linear", "cosformer", "favor", "rfa", "flow", "mixed_chunk"}
    for name in ATTENTIONS:
        for option, takers in (("forget", forgetting), ("short_conv", constant)):
            assert (name in causal_names and option in options_of(name, True).described()) == (name in takers)
            assert "bidirectional" not in ATTENTIONS[name].supports or option not in options_of(name, False).described()
    plain = build_attention("flow", True, forget="none", short_conv=0)
    assert not isinstance(plain, (ForgetAttention, ShortConvAttention))


@pytest.mark.parametrize("forget", FORGETS)
def test_a_new_gate_remembers_tens_to_a_thousand_tokens_whatever_it_reads(forget):
    """Its numbers are float32 under autocast and for tokens of half precision."""
    gate, x = ForgetGate(forget, 12, heads=4, features=6), torch.randn(2, 5, 12)
    log_decay = gate(x)
    assert log_decay.shape == ((2, 4, 5) if forget == "head" else (2, 4, 5, 6))
    remembered, dim = 1 / -torch.expm1(log_decay), 1 if forget == "head" else 3
    for found, number in ((remembered.amin(dim), 32.0), (remembered.amax(dim), 1024.0)):
        assert_close("remembered", found, torch.full_like(found, number), 1e-3)
    gate.gate_proj.weight.data.normal_()
    expected = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gate(x)
    assert rounded.dtype == gate(x.bfloat16()).dtype == torch.float32
    assert_close("under autocast", rounded, expected)


@pytest.mark.parametrize("forget", FORGETS)
@pytest.mark.parametrize("name", forgetting)
def test_thousands_of_tokens_with_gates_near_nothing_and_near_all(name, forget):
    """float32 agrees with float64, and all gradients are finite."""
    options = {} if name == "cosformer" else counts(ATTENTIONS[name], 16)
    torch.manual_seed(0)
    module = build_attention(name, True, num_heads=1, head_dim=8, max_tokens=2048, **options).eval().double()
    generator, n = torch.Generator().manual_seed(1), 2048
    inputs = {x: torch.randn(1, 1, n, 8, generator=generator, dtype=torch.float64) for x in "qkv"}
    shape = (1, 1, n) if forget == "head" else (1, 1, n, module.key_features(8))
    # Of a hundred tokens, one forgets everything, a few forget most of it, and the others almost nothing.
    log_decay = -(torch.rand(shape, generator=generator, dtype=torch.float64) ** 40) * 100.0 - 1e-7
    log_decay[..., 1000:1010] = -100.0 if forget == "head" else log_decay[..., 1000:1010]
    expected = module(**inputs, log_decay=log_decay)
    leaves = {name: x.float().requires_grad_() for name, x in {**inputs, "log_decay": log_decay}.items()}
    out = module.float()(**leaves)
    assert_close("out", out, expected, 1e-4)
    for name_of, gradient in zip(leaves, torch.autograd.grad(out.square().sum(), list(leaves.values()))):
        assert torch.isfinite(gradient).all() and gradient.any(), name_of


@pytest.mark.parametrize("name, options", [("gla", {}), ("kimi_delta", {}), ("linear", {"forget": "channel"})])
def test_many_gates_by_channel_at_once_are_as_few_at_a_time(name, options):
    """From almost closed to almost open; the logarithms of many are computed otherwise."""
    module = build(name, True, **options)
    inputs = tensors(module, 600, scale=2.0)
    outputs = module(**inputs), run_in_parts(module, inputs, [100] * 6)[0]
    actual, expected = ([x, *torch.autograd.grad(x.square().sum(), list(inputs.values()))] for x in outputs)
    for key, x, y in zip(("out", *inputs), actual, expected):
        assert_close(key, x, y)


def test_what_favor_has_forgotten_does_not_hide_later_keys():
    """An early key has a far larger feature than a later one; then a gate erases everything."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4, generator=generator) for _ in range(3))
    directions = torch.randn(5, 4, generator=generator)
    k[:, :, 0] = 12.0 * directions[0]
    for shape in ((1, 1, 6), (1, 1, 6, 5)):
        log_decay = torch.full(shape, -0.1)
        log_decay[:, :, 2] = -2000.0
        out = favor_attention(q, k, v, directions, log_decay=log_decay, causal=True)
        later, gates = [x.double()[:, :, 2:] for x in (q, k, v)], log_decay[:, :, 2:].double()
        left = favor_attention_reference(*later, directions.double(), causal=True, log_decay=gates)
        assert_close("after the gate", out[:, :, 2:], left)


# Convolutions and positions


@pytest.mark.parametrize("name", constant)
def test_every_constant_state_takes_a_convolution_and_as_the_identity_it_changes_nothing(name):
    module, plain, mask = (*(Case(name, True, short_conv=taps).build() for taps in (4, None)), padding("holes", 2, 11))
    inputs = tensors(module, 11, grad=False)
    out, _ = run_in_parts(module, inputs, (1, 6, 4), mask)
    assert_close("out", out, module(**inputs, **both(mask)))
    assert not torch.allclose(out, plain(**inputs, **both(mask)))
    for part in module.modules():
        if isinstance(part, ShortConv):
            part.weight.data.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    module.inner.load_state_dict(plain.state_dict())
    assert_close("as without", module(**inputs, **both(mask)), plain(**inputs, **both(mask)))


def test_a_convolution_around_positions_and_where_there_are_no_queries():
    around = ShortConvAttention(RotaryAttention(build_attention("flow", True), CHANNELS), 3, HEADS, CHANNELS).double()
    for module in (around, Case("daft_conv", True, options={"query": False}, short_conv=2).build()):
        inputs = tensors(module, 9, grad=False)
        out, _ = run_in_parts(module, inputs, (4, 5))
        for expected in (module(**inputs), module.reference(**inputs)):
            assert_close("out", out, expected)


# Refusals

#: Options that a mechanism does not accept: name, causal, options, and how the message begins.
BUILDS = [
    ("flows", False, {}, "attention is 'flows'"),
    *((name, False, {"head_dim": 5}, "head_dim is 5") for name in ("combiner", "mixed_chunk")),
    *((name, False, {"max_tokens": 10**12}, "max_tokens") for name in ("daft_full", "linformer", "synthesizer")),
    *(("daft_conv", False, {"window": window}, "window is") for window in (4, (5, 4), (5, 5, 5), ())),
    ("daft_conv", True, {"window": (5, 5)}, r"window is \(5, 5\)"),
    ("daft_conv", False, {"window": 5, "local_only": True, "gumbel_temperature": 0.5}, "local_only=True is given"),
    ("daft_full", False, {"max_tokens": 2.5}, "max_tokens is 2.5"),
    *((name, False, {"forget": "channel"}, "forget is 'channel'") for name in forgetting),
    *((name, True, {"forget": "head"}, "forget is 'head'") for name in causal_names if name not in forgetting),
    *((name, True, {"short_conv": 4}, "short_conv is 4") for name in causal_names if name not in constant),
    *(("flow", True, {"short_conv": wrong}, f"short_conv is {wrong!r}") for wrong in (-1, 2.0, True, "4")),
    ("flow", True, {"forget": "tokens"}, "forget is 'tokens'"),
    ("flow", False, {"short_conv": 4}, "short_conv is 4"),
    *(("flow", True, {"head_dim": None, **x}, "head_dim is None") for x in ({"forget": "head"}, {"short_conv": 4})),
]


def refused_calls() -> Iterator[tuple[Callable, str]]:
    """Calls, and how the message about each begins."""
    for name, causal, options, said in BUILDS:
        sizes = counts(ATTENTIONS[name]) if name in (*forgetting, *constant) else {}
        yield partial(build_attention, name, causal, **{**SHAPE, **sizes, **options}), said
    for inner, dim, said in (
        (build_attention("flow"), 5, "head_dim is 5"),
        (build_attention("soft", num_heads=2, head_dim=8, spatial_dims=2), 8, "inner is attention 'soft'"),
        (build_attention("flow", True, **SHAPE, short_conv=3), CHANNELS, "inner has short_conv"),
    ):
        yield partial(RotaryAttention, inner, dim), said
    q, gate = torch.randn(2, 2, 5, 4), torch.zeros(2, 2, 5)
    scan = build_attention("linear", True, **SHAPE, forget="head", cumulative_sum="scan")
    yield partial(scan, q, q, q, x=torch.randn(2, 5, 8)), "cumulative_sum .*'scan'"
    yield partial(linear_attention, q, q, q, log_decay=gate), "log_decay .*causal=False"
    for wrong in (gate[:, :, 1:], torch.zeros(2, 2, 5, 3), gate.long(), 0.5):
        yield partial(linear_attention, q, q, q, log_decay=wrong, causal=True), "log_decay "
    for option in ({"linear": False}, {"overlap": True}, {"chunk_summaries": True}):
        arguments = {"chunk_size": 4, "causal": True, "log_decay": gate, **option}
        yield partial(mixed_chunk_attention, q, q, q, q, q, **arguments), "log_decay "
    for name, k in (("daft_conv", q[..., :1]), ("daft_full", q)):
        for query, wrong, shown in ((True, None, "None"), (False, q, "given")):
            yield partial(build_attention(name, **SHAPE, query=query), wrong, k, q), f"q is {shown}"
    combiner, other = (build("combiner", True, row_length=length) for length in (4, 3))
    inputs = tensors(combiner, 9, grad=False)
    _, state = combiner.extend(**at(inputs, slice(0, 8)))
    yield partial(other.extend, **at(inputs, slice(8, 9)), state=state), "initial_state .*tokens"
    for model in (nn.Sequential(LinearAttention()), nn.Sequential(build_attention("daft_full", **SHAPE))):
        yield partial(position_entropy, model), "model is a Sequential without DAFT-conv"


def test_what_is_refused():
    for call, said in refused_calls():
        with pytest.raises(ValueError, match=f"^{said}.*allowed"):
            call()
