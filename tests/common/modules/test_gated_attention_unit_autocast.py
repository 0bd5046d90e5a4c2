"""Under autocast in bfloat16 the gated attention unit is accurate to 1e-2 at 32,768 tokens, without chunks at 2,048."""

import pytest
import torch

from common.modules.gated_attention_unit import GatedAttentionUnit
from tests.compare import assert_close, gradients

LONG = 32768
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def assert_precise(function, inputs, parameters) -> None:
    """Compare ``function`` on bfloat16 inputs under autocast with float32 on the same numbers."""
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in halves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*halves)
    expected = function(*wide)
    assert_close("out", out.float(), expected, 1e-2)
    assert_close("last tokens", out[..., -100:, :].float(), expected[..., -100:, :], 1e-2)
    actual, wanted = gradients(out, [*halves, *parameters]), gradients(expected, [*wide, *parameters])
    for i, (gradient, other) in enumerate(zip(actual, wanted)):
        assert_close(f"gradient {i} of the inputs and parameters", gradient.float(), other, 1e-2)


@pytest.mark.parametrize(
    "form", [{"chunk_size": 256}, {"chunk_size": None, "max_positions": 2048}], ids=["flash", "quad"]
)
@causality
def test_gated_attention_unit(causal, form):
    unit = GatedAttentionUnit(8, expanded_dim=16, query_dim=8, causal=causal, **form)
    x = torch.randn(1, LONG if form["chunk_size"] else 2048, 8)
    assert_precise(unit, [x], unit.parameters())
