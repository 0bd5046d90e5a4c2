"""Rotary positions, relative biases, scaled sinusoids and ScaleNorm against their formulas."""

import logging
import math

import pytest
import torch
from torch import Tensor, nn

from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.norms import ScaleNorm, build_norm
from common.modules.relative_bias import RotaryBias, ToeplitzBias
from common.modules.rotary import rotate
from common.modules.sinusoids import ScaledSin
from tests.compare import assert_all_close, assert_close, gradients

HALVES = [torch.bfloat16, torch.float16]


def assert_same(out: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    """Compare outputs and gradients."""
    assert_close("out", out, expected)
    assert_all_close(map(str, range(len(leaves))), gradients(out, leaves), gradients(expected, leaves))


def complex_rotation(x, positions):
    """Channels i and i + s/2 as one complex number times exp(i · position · 10000^(-i / (s/2)))."""
    half = x.shape[-1] // 2
    angle = positions[..., None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("channels", [2, 6, 128])
def test_rotate_multiplies_by_complex_exponentials(channels):
    """With and without a graph; in half precision, far positions keep their angle."""
    x = torch.randn(2, 3, 9, channels, dtype=torch.float64, requires_grad=True)
    far = torch.arange(9) + 100000
    for positions in (torch.arange(9), far, torch.randint(0, 5000, (2, 1, 9))):
        out = rotate(x, positions)
        assert_same(out, complex_rotation(x, positions), x)
        with torch.no_grad():
            assert torch.equal(rotate(x, positions), out)
    for dtype in HALVES:
        half = x.detach().to(dtype)
        assert rotate(half, far).dtype == dtype
        assert_close("far", rotate(half, far), complex_rotation(half.double(), far), 4e-3)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_rotary_bias_is_the_product_of_two_rotated_vectors(heads):
    module = RotaryBias(6, heads).double()
    for tokens in (1, 2, 9):
        positions = torch.arange(tokens)
        a, b = (complex_rotation(x[:, None].expand(-1, tokens, -1), positions) for x in (module.a, module.b))
        matrix, bias = a @ b.transpose(-2, -1), module(tokens)  # (H, query, key), (H, distances)
        assert bias.shape == (heads, 2 * tokens - 1)
        gathered = torch.stack([bias[:, m - torch.arange(tokens) + tokens - 1] for m in range(tokens)], dim=1)
        assert_same(gathered, matrix, module.a, module.b)


def test_a_toeplitz_bias_gives_a_distance_the_same_entry_at_any_length(caplog):
    """Also one that is loaded for more tokens, of which it keeps the middle, as the log says."""
    module, short = ToeplitzBias(5, heads=2), ToeplitzBias(3, heads=2)
    state = module.state_dict()
    with caplog.at_level(logging.INFO, logger="common.modules.relative_bias"):
        short.load_state_dict(state)
        ToeplitzBias(5, heads=2).load_state_dict(state)
    assert "for 5 tokens is read for 3" in caplog.text and len(caplog.records) == 1
    assert state["weight"].shape == (2, 9), "the caller's dict stays"
    for each, lengths in ((module, (1, 2, 4, 5)), (short, (1, 2, 3))):
        for tokens in lengths:
            for distance in range(1 - tokens, tokens):
                assert torch.equal(each(tokens)[:, distance + tokens - 1], module.weight[:, distance + 4])
    for wrong in (ToeplitzBias(2, heads=2).weight, ToeplitzBias(8).weight, torch.zeros(2, 8)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            short.load_state_dict({"weight": wrong})


def test_a_unit_with_smaller_chunks_loads():
    """Within one short chunk both units see every token, and differ only by the divisor C."""
    large, small = (GatedAttentionUnit(8, query_dim=4, chunk_size=size, linear=False) for size in (16, 4))
    for parameter in large.parameters():
        nn.init.normal_(parameter)
    small.load_state_dict(large.state_dict())
    x = torch.randn(2, 4, 8)
    assert not torch.allclose(small(x), large(x), atol=1e-3)
    with torch.no_grad():
        small.gamma[0] *= 4 / 16
        small.beta[0] *= 4 / 16
    assert_close("output", small(x), large(x))


def test_scaled_sin_is_the_formula():
    module, positions = ScaledSin(8).double(), torch.tensor([[0, 1, 7], [100, 3, 2]])
    angle = positions[..., None].double() * 10000 ** (-torch.arange(4).double() / 4)
    expected = torch.cat([angle.sin(), angle.cos()], dim=-1) * module.scale
    assert_close("sine and cosine", module(positions), expected, 1e-5)
    assert_close("gradient", *gradients(module(positions), [module.scale]), *gradients(expected, [module.scale]), 1e-5)
    half = ScaledSin(8).bfloat16()(positions + 30001)
    assert half.dtype == torch.bfloat16
    assert_close("half", half, module(positions + 30001))


def test_scale_norm_is_x_times_g_over_its_root_mean_square():
    """In half precision, 300² is beyond float16's range, and a sum of 4096 squares beyond bfloat16's 8 bits."""
    norm, x = ScaleNorm(6).double(), (3 * torch.randn(2, 5, 6, dtype=torch.float64) + 1).requires_grad_()
    nn.init.constant_(norm.weight, 1.7)
    assert_same(norm(x), x * norm.weight / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt(), x, norm.weight)
    zeros = torch.zeros(3, 6, requires_grad=True)
    out = ScaleNorm(6)(zeros)
    assert (out == 0).all() and torch.isfinite(*gradients(out, [zeros])).all()
    for dtype in HALVES:
        x = (300 * torch.randn(4, 4096)).to(dtype)
        out = ScaleNorm(4096).to(dtype)(x)
        assert out.dtype == dtype
        assert_close("out", out, ScaleNorm(4096).double()(x.double()))


def test_parameters_start_as_in_the_paper():
    for weights in (ToeplitzBias(4000).weight, RotaryBias(8000).a, RotaryBias(8000).b):
        assert abs(weights.mean()) < 1e-3 and abs(weights.std() - 0.02) < 1e-3
    assert ScaledSin(64).scale.tolist() == [1 / math.sqrt(64)]
    assert {name: x.tolist() for name, x in ScaleNorm(6).named_parameters()} == {"weight": [1.0]}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rotate(torch.randn(3, 5), torch.arange(3)), "channels is 5; allowed.*an even number"),
        (lambda: RotaryBias(7), "dim is 7; allowed.*an even number"),
        (lambda: ScaledSin(9), "dim is 9; allowed.*an even number"),
        (lambda: ToeplitzBias(5)(6), "the input has 6 tokens; allowed by its relative bias: 5"),
        (lambda: build_norm("rmsnorm", 6), "norm is 'rmsnorm'; allowed.*'layernorm', 'scalenorm'"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
