"""A short convolution in front of attention: checks in addition to the contract tests."""

import pytest
import torch

from common.attention import (
    ATTENTIONS,
    RotaryAttention,
    ShortConvAttention,
    build_attention,
    options_of,
    record_attention,
)
from common.modules.short_conv import ShortConv
from common.ops import flow_attention_weights
from tests.common.contract.mechanisms import Case, at, counts, run_in_parts, tensors
from tests.common.inputs import padding
from tests.common.refusals import refused
from tests.compare import assert_close

causal = [name for name, kind in ATTENTIONS.items() if "causal" in kind.supports]
constant = [name for name in causal if ATTENTIONS[name].linear_cost]


def test_it_is_a_convolution_of_each_channel_over_the_last_real_tokens():
    conv, x = ShortConv(1, 2, 3), torch.tensor([[1.0, 10.0], [2.0, 20.0], [9.0, 90.0], [3.0, 30.0]])[None, None]
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[0.01, 0.1, 1.0], [0.0, 1.0, 0.0]]]))
    mask = torch.tensor([[False, False, True, False]])
    y, last = conv(x, mask)
    torch.testing.assert_close(y[0, 0], torch.tensor([[1.0, 0.0], [2.1, 10.0], [0.0, 0.0], [3.21, 20.0]]))
    assert torch.equal(last[0, 0], torch.tensor([[2.0, 20.0], [3.0, 30.0]]))


@pytest.mark.parametrize("name", constant)
def test_every_constant_state_takes_it_and_as_the_identity_it_changes_nothing(name):
    case = Case(name, True, short_conv=4)
    module, plain, mask = case.build(), Case(name, True).build(), padding("holes", 2, 11)
    assert module.linear_cost and "short_conv" in options_of(name, True).described()
    assert not [key for key in plain.state_dict() if "conv.weight" in key]
    inputs = tensors(module, 11, grad=False)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out, states = run_in_parts(module, inputs, (1, 6, 4), mask)
    assert_close("out", out, module(**inputs, **masks))
    assert not torch.allclose(out, plain(**inputs, **masks))
    for part in module.modules():
        if isinstance(part, ShortConv):
            part.weight.data.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    module.inner.load_state_dict(plain.state_dict())
    assert_close("as without", module(**inputs, **masks), plain(**inputs, **masks))
    _, other = plain.extend(**at(inputs, slice(0, 3)))
    with refused("initial_state", "holds", "short_conv_v"):
        module.extend(**inputs, state=other)
    with refused("initial_state", "short_conv_v", "returned state"):
        plain.extend(**inputs, state=states[-1])


def test_where_there_are_no_queries():
    module = Case("daft_conv", True, options={"query": False}, short_conv=2).build()
    inputs = tensors(module, 9, grad=False)
    assert inputs["q"] is None and module.q_conv is None
    out, states = run_in_parts(module, inputs, (4, 5))
    assert_close("out", out, module(**inputs))
    assert_close("out", out, module.reference(**inputs))
    assert "short_conv_q" not in states[-1]


@pytest.mark.parametrize("name", [name for name in causal if name not in constant])
def test_where_the_state_grows_it_is_refused(name):
    assert "short_conv" not in options_of(name, True).described()
    with refused("short_conv", "4", "None"):
        shape = {"num_heads": 2, "head_dim": 4, "max_tokens": 8}
        build_attention(name, True, **shape, **counts(ATTENTIONS[name]), short_conv=4)


def test_refusals():
    shape = {"num_heads": 2, "head_dim": 4}
    with refused("short_conv", "4", "None"):
        build_attention("flow", **shape, short_conv=4)
    assert "short_conv" not in options_of("flow", False).described()
    for wrong in (-1, 2.0, True, "4"):
        with refused("short_conv", repr(wrong), "at least 1"):
            build_attention("flow", True, **shape, short_conv=wrong)
    with refused("head_dim", "None", "at least 1"):
        build_attention("flow", True, num_heads=2, short_conv=4)
    for none in (None, 0):
        assert not isinstance(build_attention("flow", short_conv=none), ShortConvAttention)


def test_rotary_positions_stand_inside():
    flow = build_attention("flow", True, num_heads=2, head_dim=4)
    with refused("inner", "short_conv", "around"):
        RotaryAttention(ShortConvAttention(flow, 3, 2, 4), 4)
    module = ShortConvAttention(RotaryAttention(flow, 4), 3, 2, 4).double()
    torch.nn.init.normal_(module.k_conv.weight)
    inputs = tensors(module, 9, grad=False)
    assert_close("out", run_in_parts(module, inputs, (4, 5))[0], module(**inputs))


def test_what_is_recorded_is_what_attention_sees():
    module = Case("flow", True, short_conv=3).build()
    inputs = tensors(module, 7, grad=False)
    with record_attention(module) as records:
        module(**inputs)
    q, k = module.q_conv(inputs["q"])[0], module.k_conv(inputs["k"])[0]
    competition, _ = flow_attention_weights(q, k, causal=True)
    assert_close("competition", records[0].competition, competition)
