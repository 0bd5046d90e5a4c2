"""Hosts draw parameters anew: each gets what the constructor gives it, and so does every buffer."""

import torch

from tests.common.contract.mechanisms import CASES, cases
from tests.compare import assert_drawn_alike, on_cpu


@cases(case for case in CASES if not case.rotary)
def test_reset_parameters_after_those_of_the_parts(case):
    torch.manual_seed(0)
    module = on_cpu(case.new)
    module.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    assert_drawn_alike(module, case.new())
