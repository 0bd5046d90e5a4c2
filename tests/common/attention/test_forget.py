"""Gates that make running sums forget: checks in addition to the contract tests."""

import pytest
import torch

from common.attention import ATTENTIONS, ForgetAttention, build_attention, options_of, record_attention
from common.modules.forget_gate import FORGETS, ForgetGate
from common.ops import flow_attention, flow_attention_weights, linear_attention, mixed_chunk_attention
from common.ops.favor import favor_attention
from common.ops.favor.reference import favor_attention_reference
from tests.common.contract.mechanisms import CHANNELS, HEADS, Case, counts, tensors
from tests.common.refusals import refused
from tests.compare import assert_close

causal = [name for name, kind in ATTENTIONS.items() if "causal" in kind.supports]
forgetting = [name for name in causal if "forget" in ATTENTIONS[name].supports]
SHAPE = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 8}


def features(name: str) -> int:
    """Key features of the contract's small case."""
    return Case(name, True).build().key_features(CHANNELS)


def log_gates(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Log gates that keep between a third and nearly all of a sum."""
    return torch.nn.functional.logsigmoid(torch.linspace(-0.7, 6.0, 97, dtype=dtype))[
        torch.randint(97, shape, generator=torch.Generator().manual_seed(3))
    ]


def test_the_mechanisms_of_sums_take_it():
    assert set(forgetting) == {"linear", "cosformer", "favor", "rfa", "flow", "mixed_chunk"}
    for name in causal:
        assert ("forget" in options_of(name, True).described()) == (name in forgetting)
        if "bidirectional" in ATTENTIONS[name].supports:
            assert "forget" not in options_of(name, False).described()
    assert options_of("flow", True).defaults()["forget"] == "none"


@pytest.mark.parametrize("forget", FORGETS)
def test_a_new_gate_remembers_tens_to_a_thousand_tokens_whatever_it_reads(forget):
    gate = ForgetGate(forget, 12, heads=4, features=6)
    log_decay = gate(torch.randn(2, 5, 12))
    assert log_decay.shape == ((2, 4, 5) if forget == "head" else (2, 4, 5, 6))
    remembered = 1 / -torch.expm1(log_decay)
    dim = 1 if forget == "head" else 3
    assert_close("shortest", remembered.amin(dim), torch.full_like(remembered.amin(dim), 32.0), 1e-3)
    assert_close("longest", remembered.amax(dim), torch.full_like(remembered.amax(dim), 1024.0), 1e-3)
    gate.gate_proj.weight.data.normal_()
    before = gate(torch.randn(2, 5, 12))
    gate.reset_parameters()
    assert not torch.equal(before, log_decay) and torch.equal(gate(torch.randn(2, 5, 12)), log_decay)


def test_the_gate_is_a_sigmoid_of_the_token_in_float32_under_autocast():
    gate, x = ForgetGate("head", 3, heads=2, features=5), torch.randn(1, 4, 3)
    torch.nn.init.normal_(gate.gate_proj.weight)
    expected = torch.sigmoid(x @ gate.gate_proj.weight.T + gate.gate_proj.bias).log().transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        log_decay = gate(x)
    assert log_decay.dtype == torch.float32
    assert_close("log_decay", log_decay, expected)
    assert gate(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", forgetting)
def test_open_gates_change_nothing_and_equal_ones_are_a_heads(name):
    module, n = Case(name, True).build(), 23
    inputs = tensors(module, n, grad=False)
    plain = module(**inputs)
    gates = log_gates((2, HEADS, n))
    of_channels = gates.unsqueeze(-1).expand(*gates.shape, features(name))
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
        doubled = [x.double() for x in (q, k, v, directions)]
        # The gate erases the first tokens completely.
        left = favor_attention_reference(
            *(x[:, :, 2:] for x in doubled[:3]), doubled[3], causal=True, log_decay=log_decay[:, :, 2:].double()
        )
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
    log_decay = module.gate(inputs["x"])
    q, k, v = (inputs[x] for x in "qkv")
    whole = flow_attention_weights(q, k, causal=True, log_decay=log_decay)
    assert_close("competition", records[0].competition, whole[0])
    _, state = flow_attention(
        *(x[:, :, :6] for x in (q, k, v)), causal=True, log_decay=log_decay[:, :, :6], return_state=True
    )
    actual = flow_attention_weights(
        *(x[:, :, 6:] for x in (q, k)), causal=True, log_decay=log_decay[:, :, 6:], initial_state=state
    )
    for weight, other in zip(actual, whole):
        assert_close("after a state", weight, other[:, :, 6:])


def test_states_with_and_without_gates_are_not_mixed():
    for name in ("flow", "mixed_chunk"):
        plain, module = Case(name, True).build(), Case(name, True, forget="head").build()
        inputs = tensors(module, 3, grad=False)
        x = inputs.pop("x")
        with refused("initial_state", "holds", "a returned state"):
            module.extend(**inputs, x=x, state=plain.extend(**inputs)[1])
        with refused("initial_state", "holds", "a returned state"):
            plain.extend(**inputs, state=module.extend(**inputs, x=x)[1])


@pytest.mark.parametrize("name", [name for name in causal if name not in forgetting])
def test_a_mechanism_without_running_sums_refuses(name):
    with refused("forget", "'head'", "'none'"):
        build_attention(name, True, **SHAPE, **counts(ATTENTIONS[name]), forget="head")


def test_refusals():
    for name in forgetting:
        with refused("forget", "'channel'", "'none'"):
            build_attention(name, False, **SHAPE, forget="channel")
    with refused("forget", "'tokens'", "'head'"):
        build_attention("flow", True, **SHAPE, forget="tokens")
    with refused("head_dim", "None", "at least 1"):
        build_attention("flow", True, num_heads=2, forget="head")
    assert not isinstance(build_attention("flow", True, forget="none"), ForgetAttention)
    with refused("cumulative_sum", "'scan'", "'matmul'"):
        module = build_attention("linear", True, **SHAPE, forget="head", cumulative_sum="scan")
        module(**tensors(module, 3, dtype=torch.float32))


def test_gates_of_the_functions():
    q = torch.randn(2, 3, 5, 4)
    gate = torch.zeros(2, 3, 5)
    with refused("log_decay", "causal=False", "causal=True"):
        linear_attention(q, q, q, log_decay=gate)
    wrongs = {"(2, 3, 4)": gate[:, :, 1:], "(2, 3, 5, 3)": torch.zeros(2, 3, 5, 3), "int64": gate.long(), "float": 0.5}
    for shape, wrong in wrongs.items():
        with refused("log_decay", shape, ""):
            linear_attention(q, q, q, log_decay=wrong, causal=True)
    arguments = {"chunk_size": 4, "causal": True, "log_decay": gate}
    for option in ({"linear": False}, {"overlap": True}, {"chunk_summaries": True}):
        with refused("log_decay", "given", next(iter(option))):
            mixed_chunk_attention(q, q, q, q, q, **arguments, **option)
