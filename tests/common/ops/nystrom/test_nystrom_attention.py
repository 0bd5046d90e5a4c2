"""Nyström attention beyond the contract: its estimate, its landmarks, and comparison with nystrom-attention."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import nystrom_attention
from tests.common.inputs import qkv
from tests.common.refusals import refused, tensors
from tests.compare import assert_close


def test_it_is_softmax_attention_where_landmarks_stand_for_their_tokens():
    """Each token occurs three times in a row: its landmark is the token, and enough steps find the inverse."""
    q, k, v = (x.detach() for x in qkv(4, d=8, scale=2.0))
    q, k, v = (x.repeat_interleave(3, dim=2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v)
    assert_close("out", nystrom_attention(q, k, v, landmarks=4, iterations=20), expected)
    few = nystrom_attention(q, k, v, landmarks=4, iterations=6)
    assert (few - expected).norm() > 1e-6 * expected.norm(), "the number of steps is part of the mechanism"


@pytest.mark.parametrize("n", [1, 3, 5])
def test_landmarks_that_no_token_falls_to_are_as_if_they_were_not_there(n):
    inputs = qkv(n)
    assert_close("out", nystrom_attention(*inputs, landmarks=16), nystrom_attention(*inputs, landmarks=n))


def test_the_convolution_is_over_real_tokens():
    """A filter that reads the previous token reads the previous real one, however much padding is in between."""
    q, k, v = (x.detach() for x in qkv(6, batch=1))
    mask = torch.tensor([[False, True, True, False, False, True]])
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    weight = torch.zeros(2, 1, 3, 1, dtype=q.dtype)
    weight[:, :, 0] = 1.0
    added = nystrom_attention(q, k, v, conv_weight=weight, **masks) - nystrom_attention(q, k, v, **masks)
    expected = torch.zeros_like(v)
    expected[:, :, 3], expected[:, :, 4] = v[:, :, 0], v[:, :, 3]
    assert_close("what is added", added, expected)


@pytest.mark.parametrize("side", [-50.0, 50.0])
def test_large_keys_and_queries_stay_finite(side):
    q, k, v = (x.detach() for x in qkv(40, dtype=torch.float32))
    assert torch.isfinite(nystrom_attention(side * q, 50.0 * k, v, landmarks=8)).all()


def test_what_does_not_fit_is_refused():
    with refused("iterations", "21", "20"):
        nystrom_attention(**tensors(), iterations=21)
    with refused("conv_kernel", "4", "odd"):
        build_attention("nystrom", num_heads=2, conv_kernel=4)


def test_it_is_nystrom_attention_of_one_head_and_one_sequence():
    """With more, that package starts every inverse from the largest norm of all, and so depends on neighbours."""
    package = pytest.importorskip("nystrom_attention")
    layer = package.NystromAttention(8, dim_head=8, heads=1, num_landmarks=4, residual_conv_kernel=5).double()
    layer.to_out = torch.nn.Identity()
    module = build_attention("nystrom", num_heads=1, landmarks=4, conv_kernel=5).double()
    module.conv.load_state_dict(layer.res_conv.state_dict())
    x = torch.randn(2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = layer.to_qkv(x).unsqueeze(1).chunk(3, dim=-1)
    assert_close("a sequence", module(q, k, v)[:1, 0], layer(x[:1]))
    x[1] *= 9.0
    both = layer(x)[:1]
    assert (both - layer(x[:1])).norm() > 1e-6 * both.norm(), "a neighbour changes theirs"
