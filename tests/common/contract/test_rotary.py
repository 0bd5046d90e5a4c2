"""Rotary positions fit every mechanism whose queries and keys have dot products; a layer that is built also works.

Some mechanisms with rotary positions are tested with the whole contract; see ``WITH_ROTARY``.
"""

from itertools import product

import pytest
import torch

from common.attention import INPUTS, ForgetAttention, RotaryAttention, ShortConvAttention
from common.modules.rotary import rotate
from tests.common.contract.mechanisms import CHANNELS, HEADS, PLAIN, Case, cases, run_in_parts, tensors
from tests.compare import assert_close


def can_be_rotated(case: Case) -> bool:
    """Whether queries and keys have the same width, and the mechanism does not rotate them itself."""
    if "rotary" in case.kind.supports or set(INPUTS) & set(case.kind.needs):
        return False
    widths = case.build().projections(CHANNELS)
    return widths.get("q") == widths.get("k") == CHANNELS


@cases(case for case in PLAIN if can_be_rotated(case))
def test_it_is_the_attention_of_rotated_queries_and_keys(case):
    module = case._replace(rotary=True).build()
    assert type(module.inner) is case.kind and module.causal == case.causal
    inputs, positions = tensors(module, 9, grad=False), torch.arange(9)
    turned = {**inputs, **{name: rotate(inputs[name], positions) for name in "qk"}}
    out = module(**inputs)
    assert torch.equal(out, module.inner(**turned))
    assert not torch.allclose(out, module.inner(**inputs))
    if case.causal:
        parts, states = run_in_parts(module, inputs, (5, 1, 3))
        assert_close("in parts", parts, out)
        assert states[-1]["rotary_count"].tolist() == [9, 9]


#: The wrappers that a mechanism may have.
AROUND = {
    "rotary": lambda inner: RotaryAttention(inner, CHANNELS),
    "short_conv": lambda inner: ShortConvAttention(inner, 3, HEADS, CHANNELS),
    "forget": lambda inner: ForgetAttention(inner, "channel", HEADS, CHANNELS),
}


@cases(PLAIN)
def test_whatever_is_built_around_it_works(case):
    """Each wrapper alone and each pair in either order; combinations that cannot work are refused at construction."""
    for around in [*product(AROUND), *product(AROUND, repeat=2)]:
        module = case.build()
        try:
            for name in around:
                module = AROUND[name](module).double()
        except ValueError as error:
            assert "allowed" in str(error)
            continue
        inputs = tensors(module, 6, grad=False)
        assert_close(f"out with {around}", module(**inputs), module.reference(**inputs))
        if case.causal:
            assert_close(f"extend with {around}", module.extend(**inputs)[0], module(**inputs))


@cases((case for case in PLAIN if case.name in ("daft_conv", "reformer", "synthesizer")), causal=True)
def test_what_has_no_queries_and_keys_of_one_width_is_refused(case):
    with pytest.raises(ValueError, match=f"inner is attention '{case.name}'.*allowed"):
        RotaryAttention(case.build(), CHANNELS)
