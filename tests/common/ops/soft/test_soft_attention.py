"""SOFT beyond the contract: its inverse, edges of an image, and refused uses."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import soft_attention
from tests.common.inputs import qkv
from tests.common.refusals import refused
from tests.compare import assert_close


def parameters(channels: int = 4, ratio: int = 2) -> dict:
    """Weights that produce landmarks far from each other."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(channels, channels, ratio, ratio, generator=generator, dtype=torch.float64)
    ones = torch.ones(channels, dtype=torch.float64)
    return {"landmark_weight": weight, "norm_weight": 3.0 * ones, "norm_bias": 0.1 * ones}


def test_it_is_the_kernel_through_the_inverse_of_its_landmarks():
    q, _, v = (x.detach() for x in qkv(16, d=4, heads=1, batch=1))
    weights = parameters()
    out = soft_attention(q, v, spatial_shape=(4, 4), ridge=0.2, **weights)
    x = q[0, 0] / 4**0.25
    landmarks = F.conv2d(x.T.reshape(1, 4, 4, 4), weights["landmark_weight"], stride=2)[0].flatten(1).T
    landmarks = F.gelu(F.layer_norm(landmarks, (4,), weights["norm_weight"], weights["norm_bias"]))
    rows, few = ((-torch.cdist(a, landmarks).square() / 2).exp() for a in (x, landmarks))
    inverse = torch.linalg.inv(few + 0.2 * torch.eye(4, dtype=q.dtype))
    assert_close("out", out[0, 0], rows @ inverse @ rows.T @ v[0, 0], 1e-6)


@pytest.mark.parametrize("ratio", [2, 3, 5])
def test_beyond_the_edge_is_as_padding(ratio):
    """An image of 3 x 4 tokens, alone and in the corner of one of 5 x 6."""
    q, _, v = (x.detach() for x in qkv(30, d=4))
    inside = torch.zeros(5, 6, dtype=torch.bool)
    inside[:3, :4] = True
    mask = ~inside.flatten().expand(2, -1)
    conv = {"conv_weight": torch.randn(2, 1, 3, 3, dtype=q.dtype)}
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    whole = soft_attention(q, v, spatial_shape=(5, 6), **parameters(ratio=ratio), **conv, **masks)
    q, v, whole = (x[:, :, inside.flatten()] for x in (q, v, whole))
    assert_close("out", whole, soft_attention(q, v, spatial_shape=(3, 4), **parameters(ratio=ratio), **conv))


def test_images_alone():
    shape = {"num_heads": 2, "head_dim": 4}
    with refused("spatial_dims", "1", "2 for images"):
        build_attention("soft", **shape)
    with refused("causal", "True", "False"):
        build_attention("soft", causal=True, spatial_dims=2, **shape)
    module = build_attention("soft", spatial_dims=2, **shape).double()
    q, k, v = qkv(6, d=4)
    with refused("k", "", "None"):
        module(q, k, v, spatial_shape=(2, 3))


def test_what_does_not_fit_is_refused():
    q, _, v = qkv(6, d=4)
    arguments = {"q": q, "v": v, "spatial_shape": (2, 3), **parameters()}
    with refused("iterations", "21", "20"):
        soft_attention(**arguments, iterations=21)
    with refused("q", "norm_bias is (5,)", ""):
        soft_attention(**{**arguments, "norm_bias": torch.zeros(5)})
    with refused("conv_kernel", "2", "odd"):
        build_attention("soft", spatial_dims=2, num_heads=2, head_dim=4, conv_kernel=2)
