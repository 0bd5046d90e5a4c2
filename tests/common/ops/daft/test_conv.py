"""DAFT-conv equals equation 7 in sequences and images, in both causal forms, whatever the size of keys and biases."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import daft_conv
from common.ops.daft.conv_reference import daft_conv_reference
from tests.common.inputs import SIDES, padding
from tests.common.ops.daft.formulas import (
    assert_agrees,
    assert_every_row_is_right,
    daft_inputs,
    filter_bias,
    normal,
    written_out,
)
from tests.compare import assert_close, gradients

locality = pytest.mark.parametrize("local_only", [False, True], ids=["global", "local"])
#: Whether it is causal, and how that is computed: convolved at once or, if a token sees more than the window and the
#: window times the channels of a head exceeds 256, in blocks.
MODES = ("full", "convolved", "blocked")
modes = pytest.mark.parametrize("mode", MODES)
ways = pytest.mark.parametrize(
    "mode, local_only", [(mode, False) for mode in MODES] + [("full", True), ("convolved", True)]
)


def inputs_for(mode: str, tokens: int, heads: int, window: int, **options) -> list[torch.Tensor]:
    """q, k and v with the number of channels that selects the computation."""
    channels = heads * (256 // window + 1) if mode == "blocked" else 4
    return daft_inputs(tokens, heads, channels=channels, **options)


@ways
@pytest.mark.parametrize("side", ["none", "holes", "all"])
@pytest.mark.parametrize(("heads", "window"), [(1, 3), (2, 21), (4, 5), (2, 61)])
def test_forward_and_gradients(heads, window, side, mode, local_only):
    """Windows shorter and longer than blocks and than the input."""
    inputs, r = inputs_for(mode, 23, heads, window), normal(heads, window, seed=3)
    options = {"causal": mode != "full", "local_only": local_only, "key_padding_mask": padding(side, 2, 23)}
    assert_agrees(daft_conv(*inputs, r, **options), daft_conv_reference(*inputs, r, **options), [*inputs, r])


@locality
@pytest.mark.parametrize("window", [(3, 3), (5, 1), (1, 5), (3, 7), (11, 11)], ids=str)
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_images(side, window, local_only):
    """Images that are not square, with filters smaller and larger than they are; padding keeps its position."""
    for shape in ((3, 4), (6, 2), (1, 12)):
        inputs, r = daft_inputs(12, 2), normal(2, *window, seed=3)
        options = {"spatial_shape": shape, "key_padding_mask": padding(side, 2, 12), "local_only": local_only}
        assert_agrees(daft_conv(*inputs, r, **options), daft_conv_reference(*inputs, r, **options), [*inputs, r])


def test_a_sequence_is_an_image_of_one_row():
    inputs, r = daft_inputs(12, 2), normal(2, 5, seed=3)
    assert_close("out", daft_conv(*inputs, r[:, None], spatial_shape=(1, 12)), daft_conv(*inputs, r))


@hypothesis.given(
    tokens=st.integers(1, 90),
    window=st.integers(1, 60),
    heads=st.sampled_from([1, 2, 4]),
    mode=st.sampled_from(MODES),
    side=st.sampled_from(SIDES),
    local_only=st.booleans(),
)
@hypothesis.settings(max_examples=120)
def test_any_length_heads_and_window(tokens, window, heads, mode, side, local_only):
    """Compared with explicit weights, row by row without the padding."""
    causal = mode != "full"
    window += 0 if causal else 1 - window % 2
    inputs, r = inputs_for(mode, tokens, heads, window), normal(heads, window, seed=3)
    mask = padding(side, 2, tokens)
    out = daft_conv(*inputs, r, causal=causal, key_padding_mask=mask, local_only=local_only)
    for b in range(2):
        real = slice(None) if mask is None else ~mask[b]
        alone = [x[b : b + 1, real] for x in inputs]
        count = alone[0].shape[1]
        if count:
            w = filter_bias(r, count, causal, outside=-math.inf if local_only else 0.0)
            assert_close(f"row {b}", out[b : b + 1, real], written_out(*alone, w, causal))


@hypothesis.given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    window=st.tuples(*[st.sampled_from([1, 3, 5, 11])] * 2),
    heads=st.sampled_from([1, 2, 4]),
    local_only=st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_any_image_and_window(shape, window, heads, local_only):
    tokens = shape[0] * shape[1]
    inputs, r = daft_inputs(tokens, heads), normal(heads, *window, seed=3)
    w = filter_bias(r, tokens, False, shape, outside=-math.inf if local_only else 0.0)
    out = daft_conv(*inputs, r, spatial_shape=shape, local_only=local_only)
    assert_close("out", out, written_out(*inputs, w, False))


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("largest", "spread"), [(100.0, 1.0), (1.0, 50.0), (100.0, 50.0)])
def test_large_keys_and_biases(largest, spread, dtype, mode, local_only):
    """Each row is right even if large keys follow its small ones, or the largest keys have small biases."""
    tokens, window, causal = 90, 35, mode != "full"
    uniform = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    positions = torch.arange(tokens)
    rows = [
        torch.where(chosen, 1.0, -1.0)
        for chosen in (positions < 45, positions >= 45, positions % 7 == 3, positions == 40)
    ]
    rows.append((positions == 40).float())
    v = inputs_for(mode, tokens, 4, window, batch=1, dtype=dtype)[2].detach()
    outside = -math.inf if local_only else 0.0
    low = torch.full((window,), -1.0)
    filters = [low, low.index_fill(0, positions[2:window:5], 1.0), low.index_fill(0, positions[17:window], 1.0)]
    for keys in (uniform[None], *(x[None, :, None].expand(1, tokens, 4) for x in rows)):
        for bias in (uniform[:window].T, *(x.expand(4, -1) for x in filters)):
            k, r = (keys * largest).to(dtype), (bias * spread).to(dtype)
            w = filter_bias(r.double(), tokens, causal, outside=outside)
            assert_every_row_is_right(
                lambda k, v, r=r: daft_conv(None, k, v, r, local_only=local_only, causal=causal),
                lambda k, v, w=w: written_out(None, k, v, w, causal),
                k,
                v,
            )


@modes
def test_a_filter_may_blot_out_its_window(mode):
    """-1000 at every entry leaves the mean over the tokens outside, if there are any."""
    inputs, r = inputs_for(mode, 37, 2, 9), torch.full((2, 9), -1000.0, dtype=torch.float64)
    options = {"causal": mode != "full"}
    out = daft_conv(*inputs, r, **options)
    expected = daft_conv_reference(*inputs, r, **options)
    assert_close("out", out[:, 9:], expected[:, 9:])


@pytest.mark.parametrize("mode", ["full", "blocked"])
def test_a_filter_of_one_number_over_all_cancels(mode):
    """No token is outside of the window then, and the empty outside must not outweigh the inside."""
    inputs, r = inputs_for(mode, 13, 2, 27, dtype=torch.float32), torch.zeros(2, 27)
    options = {"causal": mode != "full"}
    expected = daft_conv(*inputs, r, **options)
    for number in (-200.0, 200.0):
        assert_close("out", daft_conv(*inputs, r + number, **options), expected)


@ways
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_a_constant_added_to_all_keys_cancels(side, mode, local_only):
    """Padding is included, since its keys must not serve as the reference."""
    (q, k, v), r = inputs_for(mode, 37, 2, 9), normal(2, 9, seed=3)
    options = {"causal": mode != "full", "local_only": local_only, "key_padding_mask": padding(side, 2, 37)}
    expected = daft_conv(q, k, v, r, **options)
    for constant in (-1000.0, 1000.0):
        assert_close("out", daft_conv(q, k + constant, v, r, **options), expected)


@locality
@pytest.mark.parametrize("spread", [1.0, 50.0])
def test_large_keys_and_biases_of_images(spread, local_only):
    """One pixel far above all others, under filters that cancel most of it."""
    keys = torch.full((1, 42, 4), -100.0)
    keys[:, 17] = 100.0
    v, r = normal(1, 42, 4, dtype=torch.float32).detach(), torch.full((4, 3, 5), -spread)
    r[:, 0, 1] = spread
    w = filter_bias(r.double(), 42, False, (6, 7), outside=-math.inf if local_only else 0.0)
    assert_every_row_is_right(
        lambda k, v: daft_conv(None, k, v, r, spatial_shape=(6, 7), local_only=local_only),
        lambda k, v: written_out(None, k, v, w, False),
        keys,
        v,
    )


@modes
@pytest.mark.parametrize("below", [100.0, 105.0, 110.0])
def test_gradients_where_all_outside_of_a_window_weighs_nearly_nothing(below, mode):
    """One key is so far above the others that their exponentials reach the limits of float32, with large values."""
    (q, k, v), r = inputs_for(mode, 30, 2, 9), normal(2, 9, seed=3)
    high = (torch.arange(30) == 12).unsqueeze(1)  # (T, 1)
    k = torch.where(high, k, k - below)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, 1000.0 * v, r)]
        results.append(gradients(daft_conv(*leaves, causal=mode != "full"), leaves))
    assert all(torch.isfinite(gradient).all() for gradient in results[0])
    assert_close("gradient of v", results[0][2], results[1][2].float())
