"""ScaleNorm against its formula, and norms by name."""

import pytest
import torch
from torch import nn

from common.modules.norms import NORMS, ScaleNorm, build_norm
from tests.common.refusals import refused
from tests.compare import assert_close, gradients


def test_scale_norm_is_x_times_g_over_its_root_mean_square():
    norm = ScaleNorm(6, eps=0.0).double()
    nn.init.constant_(norm.weight, 1.7)
    x = (3 * torch.randn(2, 5, 6, dtype=torch.float64) + 1).requires_grad_()
    expected = x * norm.weight / (x**2).mean(-1, keepdim=True).sqrt()
    assert_close("out", norm(x), expected)
    for name, actual, wanted in zip(
        ("x", "g"), gradients(norm(x), [x, norm.weight]), gradients(expected, [x, norm.weight])
    ):
        assert_close(f"gradient of {name}", actual, wanted)
    assert_close("out", ScaleNorm(6).double()(x), x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt())


def test_scale_norm_has_one_parameter_that_starts_at_one():
    assert {name: x.tolist() for name, x in ScaleNorm(6).named_parameters()} == {"weight": [1.0]}


def test_a_vector_of_zeros_stays_zero_with_finite_gradients():
    x = torch.zeros(3, 6, requires_grad=True)
    out = ScaleNorm(6)(x)
    assert (out == 0).all() and torch.isfinite(*gradients(out, [x])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_are_summed_in_float32(dtype):
    """300² is beyond float16's range, and a sum of 4096 squares beyond bfloat16's 8 bits."""
    x = (300 * torch.randn(4, 4096)).to(dtype)
    out = ScaleNorm(4096).to(dtype)(x)
    assert out.dtype == dtype
    assert_close("out", out, ScaleNorm(4096).double()(x.double()))


def test_norms_by_name():
    assert list(NORMS) == ["layernorm", "scalenorm"]
    assert type(build_norm("layernorm", 6)) is nn.LayerNorm and build_norm("layernorm", 6).weight.shape == (6,)
    assert type(build_norm("scalenorm", 6)) is ScaleNorm
    assert repr(build_norm("scalenorm", 6)) == "ScaleNorm(6, eps=1e-05)"
    with refused("norm", "'rmsnorm'", "'layernorm', 'scalenorm'"):
        build_norm("rmsnorm", 6)
