"""Rotary positions fit every mechanism whose queries and keys have dot products.

All promises of some of them with rotary positions are tested as those of any mechanism; see ``WITH_ROTARY``.
"""

import torch

from common.attention import INPUTS
from common.modules.rotary import rotate
from tests.common.contract.mechanisms import CHANNELS, PLAIN, Case, cases, run_in_parts, tensors
from tests.compare import assert_close


def can_be_rotated(case: Case) -> bool:
    """Whether its queries and keys are as wide as each other, and it does not rotate them itself."""
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
