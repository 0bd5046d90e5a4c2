"""Norm and gate of each head's output: torch's own layers, refused arguments, and which parameters exist."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.attention import OutputGateAttention, build_attention
from tests.compare import assert_close

H, D = 2, 4


def build(norm: str, gate: str, name: str = "retention") -> OutputGateAttention:
    """Build the mechanism with weights that affect the output."""
    module = build_attention(name, True, num_heads=H, head_dim=D, output_norm=norm, output_gate=gate).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(generator=generator)
    return module


def tokens(n: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = {name: torch.randn(2, H, n, D, generator=generator, dtype=torch.float64) for name in "qkv"}
    return {**heads, "x": torch.randn(2, n, H * D, generator=generator, dtype=torch.float64)}


def merged(x: Tensor) -> Tensor:
    """(B, H, n, e) -> (B n, H e)."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def test_group_is_torch_s_group_norm_of_as_many_groups_as_heads():
    module, out = build("group", "none"), tokens()["v"]
    weight, bias = module.output_norm_weight.flatten(), module.output_norm_bias.flatten()
    assert_close("out", merged(module.finished(out, None)), F.group_norm(merged(out), H, weight, bias))


def test_rms_is_torch_s_rms_norm_of_each_head():
    module, out = build("rms", "none"), tokens()["v"]
    expected = F.rms_norm(out, (D,), eps=1e-5) * module.output_norm_weight[:, None]
    assert_close("out", module.finished(out, None), expected)


def test_the_gate_is_torch_s_silu_of_a_projection_and_opens_channels_side_by_side():
    module, inputs = build("none", "swish"), tokens()
    gate = F.silu(F.linear(inputs["x"], module.output_gate_proj.weight)).flatten(0, 1)
    assert_close("out", merged(module.finished(inputs["v"], inputs["x"])), merged(inputs["v"]) * gate)


@pytest.mark.parametrize("norm", ["rms", "group"])
def test_the_norm_comes_before_the_gate(norm):
    """Scaling a value changes nothing; a gate changes the output."""
    module, inputs = build(norm, "swish"), tokens()
    out = module(**inputs)
    assert_close(
        "louder", module(**{**inputs, "v": 1e4 * inputs["v"]}), module(**{**inputs, "v": 1e5 * inputs["v"]}), 1e-4
    )
    assert not torch.allclose(out, module(**{**inputs, "x": 2 * inputs["x"]}))


def test_what_is_left_out_has_no_parameters():
    assert not list(build("none", "none").parameters())
    names = [name for name, _ in build("rms", "none").named_parameters()]
    assert names == ["output_norm_weight"]
    assert build("none", "swish").output_gate_proj.bias is None
    assert build("none", "swish", "gla").output_gate_proj.bias is not None, "as its paper has it"
