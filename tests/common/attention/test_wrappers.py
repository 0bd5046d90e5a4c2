"""Gates that make sums forget, short convolutions, rotary positions, and norms and gates of outputs.

The contract compares all of them with their literal formulas; this file has what is special.
"""

import pytest
import torch
from torch.nn import functional as F

from common.attention import (
    ATTENTIONS,
    ForgetAttention,
    OutputGateAttention,
    RotaryAttention,
    ShortConvAttention,
    build_attention,
    options_of,
    record_attention,
)
from common.modules.forget_gate import FORGETS, ForgetGate
from common.modules.short_conv import ShortConv
from common.ops import flow_attention, flow_attention_weights, linear_attention, mixed_chunk_attention
from common.ops.favor import favor_attention
from common.ops.favor.reference import favor_attention_reference
from tests.common.contract.mechanisms import CHANNELS, HEADS, Case, at, both, counts, run_in_parts, tensors
from tests.common.inputs import padding
from tests.compare import assert_close

causal = [name for name, kind in ATTENTIONS.items() if "causal" in kind.supports]
constant = [name for name in causal if ATTENTIONS[name].linear_cost]
forgetting = [name for name in causal if "forget" in ATTENTIONS[name].supports]
SHAPE = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 8}


def test_who_takes_what():
    """Options of causal mechanisms: gates for those of running sums, convolutions for those of a constant state."""
    assert set(forgetting) == {"linear", "cosformer", "favor", "rfa", "flow", "mixed_chunk"}
    for name in ATTENTIONS:
        for option, takers in (("forget", forgetting), ("short_conv", constant)):
            assert (name in causal and option in options_of(name, True).described()) == (name in takers)
            assert "bidirectional" not in ATTENTIONS[name].supports or option not in options_of(name, False).described()
    plain = build_attention("flow", True, forget="none", short_conv=0)
    assert not isinstance(plain, (ForgetAttention, ShortConvAttention))


def test_what_is_refused_when_it_is_built():
    """Each argument where it cannot work; numbers of heads and channels that are missing."""
    wrongs = [("forget", "channel", name, False) for name in forgetting]
    wrongs += [("forget", "head", name, True) for name in causal if name not in forgetting]
    wrongs += [("short_conv", 4, name, True) for name in causal if name not in constant]
    wrongs += [("short_conv", wrong, "flow", True) for wrong in (-1, 2.0, True, "4")]
    wrongs += [("forget", "tokens", "flow", True), ("short_conv", 4, "flow", False)]
    for argument, value, name, direction in wrongs:
        with pytest.raises(ValueError, match=f"^{argument} is {value!r}.*allowed"):
            build_attention(name, direction, **SHAPE, **counts(ATTENTIONS[name]), **{argument: value})
    for options in ({"forget": "head"}, {"short_conv": 4}):
        with pytest.raises(ValueError, match="^head_dim is None.*allowed"):
            build_attention("flow", True, num_heads=2, **options)
    with pytest.raises(ValueError, match="^cumulative_sum .*'scan'.*allowed"):
        module = build_attention("linear", True, **SHAPE, forget="head", cumulative_sum="scan")
        module(**tensors(module, 3, dtype=torch.float32))
    conv = build_attention("flow", True, **SHAPE, short_conv=3)
    for inner, dim, said in (
        (build_attention("flow"), 5, "^head_dim is 5"),
        (build_attention("soft", num_heads=2, head_dim=8, spatial_dims=2), 8, "inner.*'soft'.*sequences"),
        (conv, CHANNELS, "inner has short_conv.*around"),
    ):
        with pytest.raises(ValueError, match=said):
            RotaryAttention(inner, dim)


# Gates


def log_gates(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Log gates that keep between a third and nearly all of a sum."""
    chosen = torch.randint(97, shape, generator=torch.Generator().manual_seed(3))
    return F.logsigmoid(torch.linspace(-0.7, 6.0, 97, dtype=dtype))[chosen]


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
    gate.reset_parameters()
    assert torch.equal(gate(torch.randn(2, 5, 12)), log_decay) and not torch.equal(expected, log_decay)


@pytest.mark.parametrize("name", forgetting)
def test_open_gates_change_nothing_and_equal_ones_are_a_heads(name):
    module, n = Case(name, True).build(), 23
    inputs, gates = tensors(module, n, grad=False), log_gates((2, HEADS, n))
    plain, features = module(**inputs), module.key_features(CHANNELS)
    of_channels = gates.unsqueeze(-1).expand(*gates.shape, features)
    for log_decay in (torch.zeros_like(gates), torch.zeros_like(of_channels)):
        assert_close("open", module(**inputs, log_decay=log_decay), plain)
    by_head = module(**inputs, log_decay=gates)
    assert_close("by channel", module(**inputs, log_decay=of_channels), by_head)
    assert not torch.allclose(by_head, plain)


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


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("form", ["paper", "released"])
def test_the_flow_into_a_sink_is_conserved_over_what_is_remembered(form, by_channel):
    """Without competition and allocation, a sink receives exactly 1, so values that are all 1 are returned as 1."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 40, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    log_decay = log_gates((2, 3, 40, 4) if by_channel else (2, 3, 40))
    options = {"form": form, "competition": "none", "allocation": "none", "causal": True}
    out, state = flow_attention(q, k, torch.ones_like(q), log_decay=log_decay, return_state=True, **options)
    assert_close("out", out, torch.ones_like(out), 1e-9 if form == "paper" else 1e-5)
    remembered = torch.zeros_like(log_decay[:, :, 0])
    for t in range(40):
        remembered = remembered * log_decay[:, :, t].exp() + 1.0
    assert_close("remembered", state["remembered"], remembered)


@pytest.mark.parametrize("forget", FORGETS)
def test_what_is_recorded_of_flow(forget):
    """Competition and allocation cover what is remembered, also after a state, and the map is the one that was used."""
    module = Case("flow", True, forget=forget).build()
    inputs = tensors(module, 9, grad=False)
    with record_attention(module, maps=True) as records:
        out = module(**inputs)
    assert_close("map times values", records[0].map @ inputs["v"], out)
    q, k, v, gates = *(inputs[x] for x in "qkv"), module.gate(inputs["x"])
    whole = flow_attention_weights(q, k, causal=True, log_decay=gates)
    assert_close("competition", records[0].competition, whole[0])
    first, last = slice(0, 6), slice(6, None)
    options = {"causal": True, "log_decay": gates[:, :, first], "return_state": True}
    _, state = flow_attention(*(x[:, :, first] for x in (q, k, v)), **options)
    options = {"causal": True, "log_decay": gates[:, :, last], "initial_state": state}
    for weight, other in zip(flow_attention_weights(*(x[:, :, last] for x in (q, k)), **options), whole):
        assert_close("after a state", weight, other[:, :, 6:])


def test_gates_and_states_that_do_not_fit():
    for name in ("flow", "mixed_chunk"):
        plain, module = Case(name, True).build(), Case(name, True, forget="head").build()
        inputs = tensors(module, 3, grad=False)
        without = {name: x for name, x in inputs.items() if name != "x"}
        for own, other, more in ((module, plain, inputs), (plain, module, without)):
            state = other.extend(**(without if own is module else inputs))[1]
            with pytest.raises(ValueError, match="^initial_state.*allowed"):
                own.extend(**more, state=state)
    q, gate = torch.randn(2, 3, 5, 4), torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match="^log_decay .*causal=False.*allowed"):
        linear_attention(q, q, q, log_decay=gate)
    for wrong in (gate[:, :, 1:], torch.zeros(2, 3, 5, 3), gate.long(), 0.5):
        with pytest.raises(ValueError, match="^log_decay .*allowed"):
            linear_attention(q, q, q, log_decay=wrong, causal=True)
    for option in ({"linear": False}, {"overlap": True}, {"chunk_summaries": True}):
        with pytest.raises(ValueError, match=f"^log_decay .*allowed.*{next(iter(option))}"):
            mixed_chunk_attention(q, q, q, q, q, chunk_size=4, causal=True, log_decay=gate, **option)


# Convolutions


def test_it_is_a_convolution_of_each_channel_over_the_last_real_tokens():
    conv, x = ShortConv(1, 2, 3), torch.tensor([[1.0, 10.0], [2.0, 20.0], [9.0, 90.0], [3.0, 30.0]])[None, None]
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[0.01, 0.1, 1.0], [0.0, 1.0, 0.0]]]))
    y, last = conv(x, torch.tensor([[False, False, True, False]]))
    torch.testing.assert_close(y[0, 0], torch.tensor([[1.0, 0.0], [2.1, 10.0], [0.0, 0.0], [3.21, 20.0]]))
    assert torch.equal(last[0, 0], torch.tensor([[2.0, 20.0], [3.0, 30.0]]))


@pytest.mark.parametrize("name", constant)
def test_every_constant_state_takes_it_and_as_the_identity_it_changes_nothing(name):
    module, plain, mask = (*(Case(name, True, short_conv=taps).build() for taps in (4, None)), padding("holes", 2, 11))
    inputs = tensors(module, 11, grad=False)
    out, states = run_in_parts(module, inputs, (1, 6, 4), mask)
    assert_close("out", out, module(**inputs, **both(mask)))
    assert not torch.allclose(out, plain(**inputs, **both(mask)))
    for part in module.modules():
        if isinstance(part, ShortConv):
            part.weight.data.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    module.inner.load_state_dict(plain.state_dict())
    assert_close("as without", module(**inputs, **both(mask)), plain(**inputs, **both(mask)))
    _, other = plain.extend(**at(inputs, slice(0, 3)))
    for own, state in ((module, other), (plain, states[-1])):
        with pytest.raises(ValueError, match="^initial_state .*short_conv_v"):
            own.extend(**inputs, state=state)


def test_a_convolution_where_there_are_no_queries_and_what_is_recorded_after_it():
    module = Case("daft_conv", True, options={"query": False}, short_conv=2).build()
    inputs = tensors(module, 9, grad=False)
    out, states = run_in_parts(module, inputs, (4, 5))
    assert inputs["q"] is None and "short_conv_q" not in states[-1]
    for expected in (module(**inputs), module.reference(**inputs)):
        assert_close("out", out, expected)
    module = Case("flow", True, short_conv=3).build()
    inputs = tensors(module, 7, grad=False)
    with record_attention(module) as records:
        module(**inputs)
    q, k = module.q_conv(inputs["q"])[0], module.k_conv(inputs["k"])[0]
    assert_close("competition", records[0].competition, flow_attention_weights(q, k, causal=True)[0])
    rotary = RotaryAttention(build_attention("flow", True), CHANNELS)
    module = ShortConvAttention(rotary, 3, HEADS, CHANNELS).double()
    inputs = tensors(module, 9, grad=False)
    assert_close("around positions", run_in_parts(module, inputs, (4, 5))[0], module(**inputs))


# Norms and gates of outputs


def finishing(norm: str, gate: str, name: str = "retention") -> OutputGateAttention:
    """Build the mechanism with weights that affect the output."""
    return Case(name, True, options={"output_norm": norm, "output_gate": gate}).build()


def merged(x: torch.Tensor) -> torch.Tensor:
    """(B, H, n, e) -> (B n, H e)."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def test_norms_and_gates_are_torch_s_own_layers():
    """Group norm with as many groups as heads, RMS norm of each head, and silu of a projection."""
    inputs = tensors(finishing("group", "swish"), 7, grad=False)
    x, v = inputs["x"], inputs["v"]
    module = finishing("group", "none")
    weight, bias = module.output_norm_weight.flatten(), module.output_norm_bias.flatten()
    assert_close("group", merged(module.finished(v, None)), F.group_norm(merged(v), HEADS, weight, bias))
    module = finishing("rms", "none")
    expected = F.rms_norm(v, (CHANNELS,), eps=1e-5) * module.output_norm_weight[:, None]
    assert_close("rms", module.finished(v, None), expected)
    module = finishing("none", "swish")
    gate = F.silu(F.linear(x, module.output_gate_proj.weight)).flatten(0, 1)
    assert_close("gate", merged(module.finished(v, x)), merged(v) * gate)


@pytest.mark.parametrize("norm", ["rms", "group"])
def test_the_norm_comes_before_the_gate(norm):
    """Scaling a value changes nothing; a gate changes the output."""
    module = finishing(norm, "swish")
    inputs = tensors(module, 7, grad=False)
    loud, louder = (module(**{**inputs, "v": scale * inputs["v"]}) for scale in (1e4, 1e5))
    assert_close("louder", louder, loud, 1e-4)
    assert not torch.allclose(module(**inputs), module(**{**inputs, "x": 2 * inputs["x"]}))
