"""Linear attention against its literal reference, and its state."""

import pytest
import torch

from common.ops import linear_attention
from common.ops.linear.reference import linear_attention_reference
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map
from tests.common.inputs import SIDES, padding, qkv
from tests.compare import assert_close, assert_gradients_close, gradients


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


SCAN = {"causal": True, "cumulative_sum": "scan"}


@pytest.mark.parametrize("phi", ["relu", "elu+1"])
@pytest.mark.parametrize("n", [1, 7, 70])
def test_scan_is_the_reference(phi, n):
    """Performer's prefix sums and Performer-Matmul's products (FLASH, Table 11): outputs and gradients."""
    q, k, v = qkv(n)
    for expected_of in (linear_attention_reference, linear_attention):
        out = linear_attention(q, k, v, phi=phi, **SCAN)
        expected = expected_of(q, k, v, phi=phi, causal=True)
        assert_close("out", out, expected)
        assert_gradients_close(out, expected, {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("side", SIDES)
def test_scan_with_padding(side):
    q, k, v = qkv(9)
    mask = padding(side, 2, 9)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out, expected = (
        f(q, k, v, phi="relu", **masks, **more)
        for f, more in ((linear_attention, SCAN), (linear_attention_reference, {"causal": True}))
    )
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, {"q": q, "k": k, "v": v})


def test_scan_goes_on_from_a_state_and_has_its_gradients():
    q, k, v = qkv(11)
    whole = linear_attention(q, k, v, **SCAN)
    first, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], return_state=True, **SCAN)
    second, after = linear_attention(
        q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], initial_state=state, return_state=True, **SCAN
    )
    parts = torch.cat([first, second], dim=2)
    assert_close("parts", parts, whole)
    assert_gradients_close(parts, whole, {"q": q, "k": k, "v": v})
    _, expected = linear_attention(q, k, v, causal=True, return_state=True)
    for name in expected:
        assert_close(name, after[name], expected[name])


def test_scan_has_second_derivatives():
    q, k, v = qkv(5)
    results = []
    for computed in ("scan", "matmul"):
        out = linear_attention(q, k, v, causal=True, cumulative_sum=computed)
        (first,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
        results.append(gradients(first, (q, k, v)))
    for name, scan, matmul in zip("qkv", *results):
        assert_close(name, scan, matmul)


def test_unknown_cumulative_sum():
    with pytest.raises(ValueError, match="cumulative_sum is 'loop'; allowed: .*matmul.*scan"):
        linear_attention(*qkv(3), causal=True, cumulative_sum="loop")
