"""Linear attention beyond the contract: the weights of its rows, and its feature maps."""

import torch

from common.ops import linear_attention
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map
from tests.common.inputs import qkv
from tests.compare import assert_close


def test_every_row_is_an_average_of_the_values():
    q, k, v = qkv(12)
    out = linear_attention(q, k, torch.ones_like(v), causal=True)
    assert_close("average of ones", out, torch.ones_like(out), 1e-5)


def test_feature_maps_are_what_they_are_called_and_positive():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert_close("sigmoid", feature_map(x, "sigmoid"), 1 / (1 + (-x).exp()))
    assert_close("elu+1", feature_map(x, "elu+1"), torch.where(x > 0, x + 1, x.exp()))
    assert_close("relu", feature_map(x, "relu"), x.clamp(min=0) + 1e-6)
    assert all((feature_map(x, phi) > 0).all() for phi in FEATURE_MAPS)
