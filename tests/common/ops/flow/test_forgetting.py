"""Flow-Attention with sums that forget, in every form: outputs and gradients match the literal form."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.options import FORMS
from common.ops.flow.reference import flow_attention_reference
from tests.compare import assert_close, assert_gradients_close


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    ("competition", "allocation"), [("softmax", "softmax"), ("sigmoid", "none"), ("none", "sigmoid")]
)
@pytest.mark.parametrize("phi", ["sigmoid", "relu"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_gates(form, phi, competition, allocation, by_channel):
    generator = torch.Generator().manual_seed(0)
    tensors = {x: torch.randn(2, 2, 13, 4, generator=generator, dtype=torch.float64) for x in "qkv"}
    shape = (2, 2, 13, 4) if by_channel else (2, 2, 13)
    tensors["log_decay"] = -2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    options = {"form": form, "phi": phi, "competition": competition, "allocation": allocation, "causal": True}
    out = flow_attention(**tensors, **options, chunk_size=5)
    expected = flow_attention_reference(**tensors, **options)
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, tensors)
