"""Hedgehog beyond the contract: its features and the initial values of its maps."""

import torch

from common.attention import build_attention
from common.ops import hedgehog_attention
from tests.common.inputs import qkv
from tests.compare import assert_close

H, D = 2, 4


def test_at_first_features_are_softmaxes_of_the_channels_and_of_their_negatives():
    q, k, v = (x.detach() for x in qkv(6, d=D))
    module = build_attention("hedgehog", num_heads=H, head_dim=D).double()
    queries, keys = (torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1) for x in (q, k))
    scores = queries @ keys.transpose(-2, -1)
    assert_close("out", module(q, k, v), scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v)


def test_wide_maps_make_weights_as_spiky_as_those_of_softmax():
    """A large map concentrates features on the largest channel, matching only keys with the same largest channel."""
    x = 30.0 * torch.eye(D, dtype=torch.float64).expand(1, H, D, D)
    weight, bias = torch.eye(D, dtype=torch.float64).expand(H, D, D), torch.zeros(H, D, dtype=torch.float64)
    v = torch.randn(1, H, D, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = hedgehog_attention(x, x, v, 30.0 * weight, bias, 30.0 * weight, bias)
    others = (v.sum(2, keepdim=True) - v) / (D - 1)
    share = 1 / (D - 1)  # negative features: all channels except the largest, of which two tokens share D - 2
    weights = torch.tensor([1 + share, (D - 2) * share**2], dtype=torch.float64)
    expected = (weights[0] * v + (D - 1) * weights[1] * others) / (weights[0] + (D - 1) * weights[1])
    assert_close("out", out, expected, 1e-5)
