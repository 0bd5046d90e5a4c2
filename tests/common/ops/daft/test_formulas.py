"""The comparisons of these tests accept equations 5 and 7 and reject each way they have been got wrong."""

import pytest
import torch

from common.ops import daft_conv, daft_full
from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.daft.full_reference import daft_full_reference
from tests.common.ops.daft.formulas import (
    WRONG_FORMULAS,
    assert_agrees,
    assert_every_row_is_right,
    assert_past_stays,
    daft_inputs,
    filter_bias,
    normal,
    relative_to_all,
    relative_to_all_with_epsilon,
    written_out,
)

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
TOKENS = 13


def _full(causal: bool):
    """Inputs, w of (1, T, T), made anew at each call, and what both implementations of DAFT-full make of them."""
    inputs, w = daft_inputs(TOKENS), normal(TOKENS, TOKENS, seed=3)
    outputs = [op(*inputs, w, causal=causal) for op in (daft_full, daft_full_reference)]
    return inputs, w, lambda: w.unsqueeze(0), outputs


def _conv(causal: bool):
    """The same of DAFT-conv, w of (h, T, T)."""
    inputs, r = daft_inputs(TOKENS, 2), normal(2, 5, seed=3)
    outputs = [op(*inputs, r, causal=causal) for op in (daft_conv, daft_conv_reference)]
    return inputs, r, lambda: filter_bias(r, TOKENS, causal), outputs


kinds = pytest.mark.parametrize("kind", [_full, _conv], ids=["full", "conv"])


@kinds
@causality
def test_equation_5_written_out_is_accepted(causal, kind):
    inputs, leaf, w, outputs = kind(causal)
    for out in outputs:
        assert_agrees(out, written_out(*inputs, w(), causal), [*inputs, leaf])


@kinds
@causality
@pytest.mark.parametrize("wrong", WRONG_FORMULAS)
def test_wrong_formulas_are_rejected(wrong, causal, kind):
    inputs, leaf, w, outputs = kind(causal)
    for out in outputs:
        with pytest.raises(AssertionError, match="relative error"):
            assert_agrees(out, written_out(*inputs, w(), causal, WRONG_FORMULAS[wrong]), [*inputs, leaf])


WRONG_FILTERS = {
    "mirrored": lambda r: r.flip(1),
    "one place off": lambda r: r.roll(1, 1),
    "of another head": lambda r: r.flip(0),
    "multiplied by the one outside": lambda r: r - 1.0,
}


@causality
@pytest.mark.parametrize("wrong", WRONG_FILTERS)
def test_wrong_filters_are_rejected(wrong, causal):
    """A causal filter that is mirrored is one whose window is counted from the wrong end."""
    inputs, r, _, outputs = _conv(causal)
    w = filter_bias(WRONG_FILTERS[wrong](r), TOKENS, causal)
    for out in outputs:
        with pytest.raises(AssertionError, match="relative error"):
            assert_agrees(out, written_out(*inputs, w, causal), [*inputs, r])


@causality
def test_seeing_the_window_alone_is_told_from_seeing_all(causal):
    inputs, r, w, outputs = _conv(causal)

    def alone():
        return written_out(*inputs, filter_bias(r, TOKENS, causal, outside=-torch.inf), causal)

    for op, out in zip((daft_conv, daft_conv_reference), outputs):
        local = op(*inputs, r, causal=causal, local_only=True)
        assert_agrees(local, alone(), [*inputs, r])
        for actual, expected in ((out, alone()), (local, written_out(*inputs, w(), causal))):
            with pytest.raises(AssertionError, match="relative error"):
                assert_agrees(actual, expected, [*inputs, r])


@pytest.mark.parametrize("wrong", ["transposed", "upside down", "left to right"])
@pytest.mark.parametrize("shape", [(3, 4), (4, 4)], ids=str)
def test_wrong_filters_of_images_are_rejected(shape, wrong):
    tokens, changes = shape[0] * shape[1], {"transposed": lambda r: r.transpose(1, 2)}
    changes.update({"upside down": lambda r: r.flip(1), "left to right": lambda r: r.flip(2)})
    inputs, r = daft_inputs(tokens, 2), normal(2, 3, 3, seed=3)
    for op in (daft_conv, daft_conv_reference):
        out = op(*inputs, r, spatial_shape=shape)
        assert_agrees(out, written_out(*inputs, filter_bias(r, tokens, False, shape), False), [*inputs, r])
        w = filter_bias(changes[wrong](r), tokens, False, shape)
        with pytest.raises(AssertionError, match="relative error"):
            assert_agrees(out, written_out(*inputs, w, False), [*inputs, r])


def test_a_raster_of_columns_is_rejected():
    """(4, 3) of the same tokens is another image than (3, 4)."""
    inputs, r = daft_inputs(12, 2), normal(2, 3, 3, seed=3)
    with pytest.raises(AssertionError, match="relative error"):
        swapped = daft_conv(*inputs, r, spatial_shape=(4, 3))
        assert_agrees(swapped, written_out(*inputs, filter_bias(r, 12, False, (3, 4)), False), [*inputs, r])


def _late_keys(dtype: torch.dtype):
    """Keys of -100 in the first half, 100 in the second, (1, T, 4), and values."""
    late = torch.where(torch.arange(40) < 20, -100.0, 100.0)[None, :, None].expand(1, 40, 4).to(dtype)
    return late, normal(1, 40, 4, dtype=dtype).detach()


def test_a_maximum_over_the_future_is_rejected():
    """It is right for ordinary keys; before large ones small ones underflow, or an ε against that shows."""
    q, k, v = daft_inputs(40, dtype=torch.float32)
    w = normal(1, 40, 40, seed=3, dtype=torch.float32)
    late, values = _late_keys(torch.float32)
    for wrong in (relative_to_all, relative_to_all_with_epsilon):
        right, tolerance = written_out(q, k, v, w, True), 1e-3
        assert ((written_out(q, k, v, w, True, wrong) - right).norm() / right.norm()) < tolerance
        with pytest.raises(AssertionError):
            assert_every_row_is_right(
                lambda k, v, wrong=wrong: written_out(None, k, v, w, True, wrong),
                lambda k, v: written_out(None, k, v, w.double(), True),
                late,
                values,
            )


def test_a_past_that_the_future_changes_is_rejected():
    inputs, w = daft_inputs(20), normal(1, 20, 20, seed=3)
    assert_past_stays(lambda q, k, v: daft_full(q, k, v, w[0], causal=True), inputs)
    with pytest.raises(AssertionError, match="the past"):
        assert_past_stays(lambda q, k, v: written_out(q, k, v, w, True, relative_to_all_with_epsilon), inputs)
