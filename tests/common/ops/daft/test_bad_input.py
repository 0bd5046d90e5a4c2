"""DAFT's functions say which argument is wrong, what was given and what is allowed.

Masks and states of daft_full and daft_conv, which their modules pass on as they are, are in the contract tests.
"""

import pytest
import torch

from common.ops import daft_conv, daft_full, daft_select
from tests.common.refusals import refused


def tensors(k_channels=4, **changes):
    """q, v (2, 9, 4) and k (2, 9, k_channels), but for the tensors given."""
    return {"q": torch.randn(2, 9, 4), "k": torch.randn(2, 9, k_channels), "v": torch.randn(2, 9, 4), **changes}


def full(w=None, k_channels=4, **changes):
    return daft_full(**tensors(k_channels, w=torch.zeros(9, 9) if w is None else w, **changes))


def conv(r=None, **changes):
    return daft_conv(**tensors(**{"k_channels": 2, "r": torch.zeros(2, 5) if r is None else r, **changes}))


def select(**changes):
    given = {"k_channels": 2, "index": torch.tensor([1, 4]), "bias": torch.zeros(2), "window": 5}
    return daft_select(**tensors(**{**given, **changes}))


calls = pytest.mark.parametrize("call", [full, conv, select], ids=lambda call: call.__name__)

WRONG_TENSORS = {
    "q of four dimensions": ({"q": torch.randn(2, 1, 9, 4)}, "q", "(2, 1, 9, 4)", "(B, tokens, channels)"),
    "q of other channels": ({"q": torch.randn(2, 9, 3)}, "q", "(2, 9, 3)", "(2, 9, 4)"),
    "q of fewer tokens": ({"q": torch.randn(2, 8, 4)}, "q", "(2, 8, 4)", "(2, 9, 4)"),
    "a list for k": ({"k": [1.0]}, "k", "list", "a tensor"),
    "no k": ({"k": None}, "k", "NoneType", "a tensor"),
    "k of another batch": ({"k": torch.randn(1, 9, 4)}, "k", "(1, 9, 4)", "(2, 9, "),
    "k of other channels": ({"k": torch.randn(2, 9, 3)}, "k", "(2, 9, 3)", "(2, 9, "),
    "integers": ({"v": torch.ones(2, 9, 4, dtype=torch.long)}, "q", "torch.float32", "torch.int64"),
    "no tokens": ({name: torch.randn(2, 0, 4) for name in "qkv"}, "q", "(2, 0, 4)", "none empty"),
    "two dtypes": ({"q": torch.randn(2, 9, 4).half()}, "q", "torch.float16", "torch.float32"),
    "two devices": ({"q": torch.randn(2, 9, 4, device="meta")}, "q", "meta", "cpu"),
}


@calls
@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit(case, call):
    change, argument, given, allowed = WRONG_TENSORS[case]
    for causal in (False, True):
        with refused(argument, given, allowed):
            call(causal=causal, **change)


WRONG_MASKS = {
    "floating point": (torch.zeros(2, 9), "torch.float32", "torch.bool"),
    "a list": ([[False] * 9] * 2, "list", "torch.bool"),
    "one row": (torch.zeros(1, 9, dtype=torch.bool), "(1, 9)", "(2, 9)"),
    "too short": (torch.zeros(2, 8, dtype=torch.bool), "(2, 8)", "(2, 9)"),
    "elsewhere": (torch.zeros(2, 9, dtype=torch.bool, device="meta"), "meta", "cpu"),
}


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_masks_of_a_selection_that_do_not_fit(case):
    mask, given, allowed = WRONG_MASKS[case]
    for causal in (False, True):
        with refused("key_padding_mask", given, allowed):
            select(key_padding_mask=mask, causal=causal)


WRONG_BIASES = {
    "not square": (torch.zeros(9, 8), "w", "(9, 8)", "one (N, N), or two (N, n)"),
    "factors of two lengths": ((torch.zeros(9, 3), torch.zeros(8, 3)), "w", "(8, 3)", "two (N, n)"),
    "factors of two ranks": ((torch.zeros(9, 3), torch.zeros(9, 2)), "w", "(9, 2)", "two (N, n)"),
    "three factors": ((torch.zeros(9, 3),) * 3, "w", "tuple", "two (N, n)"),
    "for each channel": (torch.zeros(9, 9, 4), "w", "(9, 9, 4)", "(N, N)"),
    "integers": (torch.zeros(9, 9, dtype=torch.long), "w", "torch.int64", "floating point"),
    "a number": (1.0, "w", "float", "a tensor (N, N)"),
    "numbers": ((1.0, 2.0), "w", "float", "(N, N)"),
    "elsewhere": (torch.zeros(9, 9, device="meta"), "w", "meta", "cpu"),
    "too short": (torch.zeros(8, 8), "the input", "9 tokens", "at most 8"),
    "too short factors": ((torch.zeros(7, 3), torch.zeros(7, 3)), "the input", "9 tokens", "at most 7"),
}


@pytest.mark.parametrize("case", WRONG_BIASES)
def test_biases_of_pairs_that_do_not_fit(case):
    w, argument, given, allowed = WRONG_BIASES[case]
    for causal in (False, True):
        with refused(argument, given, allowed):
            full(w, causal=causal)


WRONG_FILTERS = {
    "one dimension": (torch.zeros(5), {}, "r", "(5,)", "(heads, window) or (heads, height, width)"),
    "four dimensions": (torch.zeros(2, 1, 3, 3), {}, "r", "(2, 1, 3, 3)", "(heads, height, width)"),
    "no window": (torch.zeros(2, 0), {}, "r", "(2, 0)", "(heads, window)"),
    "integers": (torch.zeros(2, 5, dtype=torch.long), {}, "r", "torch.int64", "floating point"),
    "a list": ([[1.0]], {}, "r", "list", "floating point"),
    "elsewhere": (torch.zeros(2, 5, device="meta"), {}, "r", "meta", "cpu"),
    "even": (torch.zeros(2, 4), {}, "r", "(4,)", "odd sizes"),
    "an even side": (torch.zeros(2, 3, 4), {"spatial_shape": (3, 3)}, "r", "(3, 4)", "odd sizes"),
    "heads that k has not": (torch.zeros(4, 5), {}, "k", "(2, 9, 2)", "(2, 9, 4)"),
    "heads that do not divide": (torch.zeros(3, 5), {"k_channels": 3}, "r", "3 heads", "a divisor of the channels, 4"),
}


@pytest.mark.parametrize("case", WRONG_FILTERS)
def test_filters_that_do_not_fit(case):
    r, options, argument, given, allowed = WRONG_FILTERS[case]
    with refused(argument, given, allowed):
        conv(r, **options)


def images(op):
    """``op`` with a window of two sizes."""
    return {conv: {"r": torch.zeros(2, 3, 3)}, select: {"window": (3, 3)}}[op]


@pytest.mark.parametrize("call", [conv, select], ids=lambda call: call.__name__)
def test_shapes_of_images_that_do_not_fit(call):
    assert call(**images(call), spatial_shape=(3, 3)).shape == (2, 9, 4)
    assert call(**images(call), spatial_shape=(1, 9)).shape == (2, 9, 4)  # smaller than the window
    for shape in ((2, 4), (9,), (3, 3, 1)):
        with refused("spatial_shape", str(shape), "(height, width) of 9 tokens"):
            call(**images(call), spatial_shape=shape)
    with refused("spatial_shape", "None with a window of (3, 3)", "(height, width)"):
        call(**images(call))
    with refused("spatial_shape", "(3, 3) with a window of (5,)", "None with a window of one"):
        call(spatial_shape=(3, 3))
    with refused("spatial_shape", "causal=True", "causal=False"):
        call(**images(call), spatial_shape=(3, 3), causal=True)


def test_even_windows_of_causal_sequences_are_allowed():
    assert conv(torch.zeros(2, 4), causal=True).shape == (2, 9, 4)
    assert select(window=6, causal=True).shape == (2, 9, 4)


WRONG_SELECTIONS = {
    "after the window": ({"index": torch.tensor([0, 5])}, "index", "[0, 5]", "0 to 4"),
    "below 0": ({"index": torch.tensor([-1, 4])}, "index", "[-1, 4]", "0 to 4"),
    "after a window of two sizes": (
        {"index": torch.tensor([0, 9]), "window": (3, 3), "spatial_shape": (3, 3)},
        "index",
        "[0, 9]",
        "0 to 8",
    ),
    "no integers": ({"index": torch.tensor([0.0, 1.0])}, "index", "torch.float32", "torch.int64"),
    "int32": ({"index": torch.tensor([0, 1], dtype=torch.int32)}, "index", "torch.int32", "torch.int64"),
    "two dimensions": ({"index": torch.tensor([[0, 1]])}, "index", "(1, 2)", "(heads,)"),
    "a list": ({"index": [0, 1]}, "index", "list", "(heads,)"),
    "heads that k has not": ({"index": torch.tensor([0])}, "k", "(2, 9, 2)", "(2, 9, 1)"),
    "heads that do not divide": (
        {"k_channels": 3, "index": torch.tensor([0, 1, 2])},
        "index",
        "3 heads",
        "a divisor of the channels, 4",
    ),
    "one bias": ({"bias": torch.zeros(1)}, "bias", "(1,)", "(2,)"),
    "a filter": ({"bias": torch.zeros(2, 5)}, "bias", "(2, 5)", "(2,)"),
    "integer biases": ({"bias": torch.tensor([0, 1])}, "bias", "torch.int64", "floating point"),
    "a number": ({"bias": 1.0}, "bias", "float", "floating point"),
    "an index elsewhere": ({"index": torch.zeros(2, dtype=torch.long, device="meta")}, "index", "meta", "cpu"),
    "a bias elsewhere": ({"bias": torch.zeros(2, device="meta")}, "bias", "meta", "cpu"),
    "an even window": ({"window": 6}, "window", "(6,)", "odd sizes"),
    "an even side": ({"window": (4, 3), "spatial_shape": (3, 3)}, "window", "(4, 3)", "odd sizes"),
    "no window": ({"window": 0}, "window", "0", "an integer of at least 1"),
    "half a window": ({"window": 2.5}, "window", "2.5", "an integer of at least 1"),
    "a window of three sizes": ({"window": (3, 3, 3)}, "window", "(3, 3, 3)", "two of them"),
    "a truth": ({"window": True}, "window", "True", "an integer of at least 1"),
}


@pytest.mark.parametrize("case", WRONG_SELECTIONS)
def test_selections_that_do_not_fit(case):
    change, argument, given, allowed = WRONG_SELECTIONS[case]
    with refused(argument, given, allowed):
        select(**change)


stateful = pytest.mark.parametrize("call", [full, conv], ids=lambda call: call.__name__)


@stateful
def test_a_state_needs_causal(call):
    _, state = call(torch.zeros(18, 18) if call is full else None, causal=True, return_state=True)
    for option in ({"initial_state": state}, {"return_state": True}):
        with refused("initial_state and return_state", "causal=False", "only with causal=True"):
            call(**option)


def test_a_state_of_another_window():
    _, state = conv(causal=True, return_state=True)
    assert conv(causal=True, initial_state=state).shape == (2, 9, 4)
    with refused("initial_state['k']", "5 of 9 tokens", "the last 6"):
        conv(torch.zeros(2, 6), causal=True, initial_state=state)
