"""A selection equals DAFT-conv under a filter with one entry per head, by indexing and without a convolution."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from common.ops import daft_conv, daft_select
from common.ops.daft.conv_reference import daft_conv_reference
from tests.common.inputs import SIDES, padding
from tests.common.ops.daft.formulas import (
    assert_agrees,
    assert_every_row_is_right,
    daft_inputs,
    filter_bias,
    normal,
    one_hot_filter,
    written_out,
)
from tests.common.properties import LargestTensor
from tests.compare import assert_close

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@causality
@pytest.mark.parametrize("side", ["none", "holes", "all"])
@pytest.mark.parametrize("window", [1, 5, 61])
def test_sequences(window, side, causal):
    """Each entry of the window in turn, including the first and last; forward and gradients, including the bias."""
    options = {"causal": causal, "key_padding_mask": padding(side, 2, 17)}
    for first in {0, window // 2, window - 1}:
        index, bias, inputs = torch.tensor([first, (first + 7) % window]), normal(2, seed=3), daft_inputs(17, 2)
        expected = daft_conv_reference(*inputs, one_hot_filter(index, bias, (window,)), **options)
        assert_agrees(daft_select(*inputs, index, bias, window=window, **options), expected, [*inputs, bias])


@pytest.mark.parametrize("window", [(1, 1), (3, 5), (11, 11)], ids=str)
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_images(side, window):
    """Each entry of a small window, and a few of one larger than the image; also without the gate."""
    entries = window[0] * window[1]
    for shape in ((3, 4), (6, 2)):
        options = {"spatial_shape": shape, "key_padding_mask": padding(side, 2, 12)}
        for first in range(0, entries, max(1, entries // 15)):
            index, bias, inputs = torch.tensor([first, entries - 1 - first]), normal(2, seed=3), daft_inputs(12, 2)
            expected = daft_conv(*inputs, one_hot_filter(index, bias, window), **options)
            assert_agrees(daft_select(*inputs, index, bias, window=window, **options), expected, [*inputs, bias])
        bare = daft_select(None, *inputs[1:], index, bias, window=window, **options)
        expected = daft_conv_reference(None, *inputs[1:], one_hot_filter(index, bias, window), **options)
        assert_agrees(bare, expected, [*inputs[1:], bias])


@hypothesis.given(
    tokens=st.integers(1, 70),
    window=st.integers(1, 60),
    heads=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    side=st.sampled_from(SIDES),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=80)
def test_any_length_heads_and_window(tokens, window, heads, causal, side, seed):
    window += 0 if causal else 1 - window % 2
    index = torch.randint(window, (heads,), generator=torch.Generator().manual_seed(seed))
    inputs, bias, mask = daft_inputs(tokens, heads), normal(heads, seed=seed), padding(side, 2, tokens)
    out = daft_select(*inputs, index, bias, window=window, causal=causal, key_padding_mask=mask)
    r = one_hot_filter(index, bias, (window,))
    assert_close("out", out, daft_conv(*inputs, r, causal=causal, key_padding_mask=mask))


@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [50.0, -50.0])
def test_large_keys_and_biases(bias, dtype, causal):
    """The neighbour may be by far the largest key with a bias that cancels it, or the smallest and be raised."""
    positions = torch.arange(60)
    rows = [
        torch.where(chosen, 1.0, -1.0)
        for chosen in (positions < 30, positions >= 30, positions % 7 == 3, positions == 20)
    ]
    rows.append((positions == 20) * 0.4)  # less above the others than a bias of -50 subtracts
    index, biases = torch.tensor([0, 3, 6, 8]), torch.full((4,), bias).to(dtype)
    w = filter_bias(one_hot_filter(index, biases.double(), (9,)), 60, causal)
    v = normal(1, 60, 4, dtype=dtype).detach()
    for x in rows:
        assert_every_row_is_right(
            lambda k, v: daft_select(None, k, v, index, biases, window=9, causal=causal),
            lambda k, v: written_out(None, k, v, w, causal),
            (x[None, :, None].expand(1, 60, 4) * 100).to(dtype),
            v,
        )


@causality
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_a_constant_added_to_all_keys_cancels(side, causal):
    """Padding is included, since its keys must not serve as the reference."""
    (q, k, v), bias, index = daft_inputs(37, 2), normal(2, seed=3), torch.tensor([1, 4])
    options = {"window": 5, "causal": causal, "key_padding_mask": padding(side, 2, 37)}
    expected = daft_select(q, k, v, index, bias, **options)
    for constant in (-1000.0, 1000.0):
        assert_close("out", daft_select(q, k + constant, v, index, bias, **options), expected)


class _Operators(TorchDispatchMode):
    """Records the names of all operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_it_indexes_instead_of_convolving():
    inputs, bias, index = daft_inputs(12, 2), normal(2, seed=3), torch.tensor([1, 4])
    for options in ({"window": 5}, {"window": 5, "causal": True}, {"window": (3, 5), "spatial_shape": (3, 4)}):
        with _Operators() as seen:
            daft_select(*inputs, index, bias, **options)
        assert "aten::gather" in seen.names and "aten::convolution" not in seen.names
    with _Operators() as seen:
        daft_conv(*inputs, one_hot_filter(index, bias, (5,)))
    assert "aten::convolution" in seen.names  # the recorder sees one


@causality
def test_memory_is_proportional_to_the_length(causal):
    """h = 4, d = 32 and a far wider window: no tensor has an entry for each entry of the window."""
    bias, index = normal(4, seed=3, dtype=torch.float32), torch.tensor([0, 100, 128, 256])
    for tokens in (500, 2000):
        inputs = daft_inputs(tokens, 4, batch=1, channels=32, dtype=torch.float32)
        with LargestTensor() as seen:
            out = daft_select(*inputs, index, bias, window=257, causal=causal)
            torch.autograd.grad(out.sum(), [*inputs, bias])
        assert seen.numel <= 40 * (tokens + 257)
