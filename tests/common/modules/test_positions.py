"""Rotary positions, relative biases and scaled sinusoids against complex numbers and explicit matrices."""

import copy
import math

import pytest
import torch

from common.modules.relative_bias import RotaryBias, ToeplitzBias, relative_bias
from common.modules.rotary import check_even, rotate
from common.modules.sinusoids import ScaledSin
from tests.common.refusals import refused
from tests.compare import assert_close, gradients


def complex_rotation(x, positions):
    """Channels i and i + s/2 as one complex number times exp(i · position · 10000^(-i / (s/2)))."""
    half = x.shape[-1] // 2
    angle = positions[..., None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("channels", [2, 6, 128])
def test_rotate_multiplies_by_complex_exponentials(channels):
    x = torch.randn(2, 3, 9, channels, dtype=torch.float64, requires_grad=True)
    for positions in (torch.arange(9), torch.arange(9) + 100000, torch.randint(0, 5000, (2, 1, 9))):
        out, expected = rotate(x, positions), complex_rotation(x, positions)
        assert_close("out", out, expected)
        assert_close("gradient", *gradients(out, [x]), *gradients(expected, [x]))


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    products = [
        [(rotate(q, torch.tensor([m])) * rotate(k, torch.tensor([n]))).sum() for n in range(9)] for m in range(9)
    ]
    for m in range(8):
        for n in range(8):
            assert_close("product", products[m][n], products[m + 1][n + 1])
    assert abs(products[0][3] - products[3][0]) > 1e-3, "the sign of the distance counts"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_far_positions_keep_their_angle_in_half_precision(dtype):
    x, positions = torch.randn(9, 64).to(dtype), torch.arange(30000, 30009)
    out = rotate(x, positions)
    assert out.dtype == dtype
    assert_close("out", out, complex_rotation(x.double(), positions), 4e-3)


def test_odd_channels_are_refused():
    with refused("the number of channels", "5", "an even number"):
        rotate(torch.randn(3, 5), torch.arange(3))
    with refused("dim", "7", "an even number"):
        RotaryBias(7)
    with refused("dim", "7", "an even number"):
        ScaledSin(7)
    with refused("width", "1", "an even number"):
        check_even("width", 1)
    check_even("width", 2)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_rotary_bias_is_the_product_of_two_rotated_vectors(heads):
    module = RotaryBias(6, heads).double()
    for tokens in (1, 2, 9):
        positions = torch.arange(tokens)
        a, b = (complex_rotation(x[:, None].expand(-1, tokens, -1), positions) for x in (module.a, module.b))
        matrix = a @ b.transpose(-2, -1)  # (H, query, key)
        bias = module(tokens)
        assert bias.shape == (heads, 2 * tokens - 1)
        gathered = torch.stack([bias[:, m - torch.arange(tokens) + tokens - 1] for m in range(tokens)], dim=1)
        assert_close("bias", gathered, matrix)
        for actual, wanted in zip(gradients(gathered, [module.a, module.b]), gradients(matrix, [module.a, module.b])):
            assert_close("gradient", actual, wanted)


def test_a_toeplitz_bias_gives_a_distance_the_same_entry_at_any_length():
    module = ToeplitzBias(5, heads=2)
    assert module.weight.shape == (2, 9)
    assert torch.equal(module(5), module.weight)
    for tokens in (1, 2, 4):
        bias = module(tokens)
        assert bias.shape == (2, 2 * tokens - 1)
        for distance in range(1 - tokens, tokens):
            assert torch.equal(bias[:, distance + tokens - 1], module.weight[:, distance + 4])
    (gradient,) = torch.autograd.grad(module(2).sum(), module.weight)
    assert gradient[0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_a_toeplitz_bias_has_a_reach():
    with refused("the input", "6 tokens", "by its relative bias: 5"):
        ToeplitzBias(5)(6)


def test_parameters_start_as_in_the_paper():
    for weights in (ToeplitzBias(4000).weight, RotaryBias(8000).a, RotaryBias(8000).b):
        assert abs(weights.mean()) < 1e-3 and abs(weights.std() - 0.02) < 1e-3
    assert ScaledSin(64).scale.tolist() == [1 / math.sqrt(64)]


def test_scaled_sin_is_the_formula():
    module = ScaledSin(8).double()
    positions = torch.tensor([[0, 1, 7], [100, 3, 2]])
    out = module(positions)
    assert out.shape == (2, 3, 8)
    for row, column in ((0, 0), (0, 2), (1, 0)):
        for i in range(4):
            angle = positions[row, column].item() * 10000 ** (-i / 4)
            expected = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64) / math.sqrt(8)
            assert_close("sine and cosine", out[row, column, [i, i + 4]], expected, 1e-5)
    (gradient,) = gradients(out, [module.scale])
    expected = gradients(out, [out])[0].mul(out.detach() * math.sqrt(8)).sum()
    assert_close("gradient of the scale", gradient, expected[None], 1e-6)


def test_scaled_sin_is_in_the_dtype_of_its_scale_and_exact_far_away():
    module, positions = ScaledSin(8), torch.tensor([30001])
    out = copy.deepcopy(module).bfloat16()(positions)
    assert out.dtype == torch.bfloat16
    assert_close("half", out, module(positions))


def test_biases_are_chosen_by_name_and_length():
    assert type(relative_bias("auto", 511, 8)) is ToeplitzBias and type(relative_bias("auto", 512, 8)) is RotaryBias
    assert relative_bias("none", 8, 8) is None
    toeplitz, rotary = relative_bias("toeplitz", 700, 8, 2), relative_bias("rotary", 7, 8, 2)
    assert toeplitz.weight.shape == (2, 1399) and rotary.a.shape == rotary.b.shape == (2, 8)
