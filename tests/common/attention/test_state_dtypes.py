"""A state begun in one dtype goes on in another, as where autocast is switched on or off during a generation."""

import contextlib

import pytest
import torch

from common.attention import ATTENTIONS
from tests.common.attention.build import build, extend
from tests.common.inputs import qkv
from tests.compare import assert_close

CAUSAL = sorted(name for name, attention in ATTENTIONS.items() if "causal" in attention.supports)
#: How the first and the last tokens are computed: in float32, in float64, or under autocast, which rounds to bfloat16.
CHANGES = [
    ("autocast", torch.float32),
    (torch.float32, "autocast"),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]


def prepared(module, how):
    """The module's dtype, that of its inputs, and the context to call it in."""
    if how == "autocast":
        return module.float(), torch.bfloat16, torch.autocast("cpu", dtype=torch.bfloat16)
    return module.to(how), how, contextlib.nullcontext()


@pytest.mark.parametrize("steps", [[6, 1, 5], [6, 6]], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_sequence_goes_on_in_another_dtype(name, change, steps):
    torch.manual_seed(0)
    module = build(name, causal=True, dtype=torch.float64).eval()
    inputs = [x.detach() for x in qkv(12, d=4, e=4, dtype=torch.float64)]
    expected, _ = extend(module, *inputs)
    state, outputs = None, []
    with torch.no_grad():
        for i, part in enumerate(zip(*(x.split(steps, dim=2) for x in inputs))):
            module, dtype, context = prepared(module, change[min(i, 1)])
            with context:
                out, state = extend(module, *(x.to(dtype) for x in part), state=state)
            assert out.dtype == dtype
            outputs.append(out.double())
    assert_close(name, torch.cat(outputs, dim=2), expected, 0.05 if "autocast" in change else 1e-5)


@pytest.mark.parametrize("name", [name for name in CAUSAL if ATTENTIONS[name].state_is_constant_size])
def test_sums_in_half_precision_are_refused(name):
    """Rounded sums are no sums: it would be wrong by more with every token."""
    module, inputs = build(name, causal=True, dtype=torch.float32), qkv(3, d=4, e=4, dtype=torch.float32)
    _, state = extend(module, *inputs)
    state = {key: x.half() if x.is_floating_point() else x for key, x in state.items()}
    with pytest.raises(ValueError, match="initial_state.*torch.float16"):
        extend(module, *inputs, state=state)
