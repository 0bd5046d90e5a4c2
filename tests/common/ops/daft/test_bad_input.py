"""DAFT's functions report which argument is wrong, what was given and what is allowed.

The contract tests tensors, masks and states of daft_full and daft_conv, which their modules pass on unchanged.
"""

import pytest
import torch

from common.ops import daft_conv, daft_full, daft_select
from tests.common.refusals import refused


def tensors(k_channels=4, **changes):
    """q, v (2, 9, 4) and k (2, 9, k_channels), replaced by ``given`` tensors."""
    return {"q": torch.randn(2, 9, 4), "k": torch.randn(2, 9, k_channels), "v": torch.randn(2, 9, 4), **changes}


def full(w=None, **changes):
    return daft_full(**tensors(**{"w": torch.zeros(9, 9) if w is None else w, **changes}))


def conv(r=None, **changes):
    return daft_conv(**tensors(**{"k_channels": 2, "r": torch.zeros(2, 5) if r is None else r, **changes}))


def select(**changes):
    arguments = {"k_channels": 2, "index": torch.tensor([1, 4]), "bias": torch.zeros(2), "window": 5}
    return daft_select(**tensors(**{**arguments, **changes}))


IMAGE = {"spatial_shape": (3, 3)}
#: Name -> (function, changed arguments, wrong argument, given value in the message, allowed value).
WRONG = {
    "q of four dimensions": (select, {"q": torch.randn(2, 1, 9, 4)}, "q", "(2, 1, 9, 4)", "(B, tokens, channels)"),
    "q of fewer tokens": (conv, {"q": torch.randn(2, 8, 4)}, "q", "(2, 8, 4)", "(2, 9, 4)"),
    "a list for k": (select, {"k": [1.0]}, "k", "list", "a tensor"),
    "k of other channels": (full, {"k": torch.randn(2, 9, 3)}, "k", "(2, 9, 3)", "(2, 9, "),
    "integers": (select, {"v": torch.ones(2, 9, 4, dtype=torch.long)}, "q", "torch.float32", "torch.int64"),
    "no tokens": (select, {name: torch.randn(2, 0, 4) for name in "qkv"}, "q", "(2, 0, 4)", "none empty"),
    "two devices": (select, {"q": torch.randn(2, 9, 4, device="meta")}, "q", "meta", "cpu"),
    "a mask of floats": (select, {"key_padding_mask": torch.zeros(2, 9)}, "key_padding_mask", "float32", "torch.bool"),
    "a short mask": (select, {"key_padding_mask": torch.zeros(2, 8).bool()}, "key_padding_mask", "(2, 8)", "(2, 9)"),
    "w not square": (full, {"w": torch.zeros(9, 8)}, "w", "(9, 8)", "one (N, N), or two (N, n)"),
    "factors of two lengths": (full, {"w": (torch.zeros(9, 3), torch.zeros(8, 3))}, "w", "(8, 3)", "two (N, n)"),
    "three factors": (full, {"w": (torch.zeros(9, 3),) * 3}, "w", "tuple", "two (N, n)"),
    "integers for w": (full, {"w": torch.zeros(9, 9, dtype=torch.long)}, "w", "torch.int64", "floating point"),
    "numbers for w": (full, {"w": (1.0, 2.0)}, "w", "float", "(N, N)"),
    "w too short": (full, {"w": torch.zeros(8, 8)}, "the input", "9 tokens", "at most 8"),
    "factors too short": (full, {"w": (torch.zeros(7, 3), torch.zeros(7, 3))}, "the input", "9 tokens", "at most 7"),
    "r of one dimension": (conv, {"r": torch.zeros(5)}, "r", "(5,)", "(heads, window) or (heads, height, width)"),
    "no window": (conv, {"r": torch.zeros(2, 0)}, "r", "(2, 0)", "(heads, window)"),
    "an even r": (conv, {"r": torch.zeros(2, 4)}, "r", "(4,)", "odd sizes"),
    "an even side": (conv, {"r": torch.zeros(2, 3, 4), **IMAGE}, "r", "(3, 4)", "odd sizes"),
    "heads that k has not": (conv, {"r": torch.zeros(4, 5)}, "k", "(2, 9, 2)", "(2, 9, 4)"),
    "three heads": (conv, {"r": torch.zeros(3, 5), "k_channels": 3}, "r", "3 heads", "a divisor of the channels, 4"),
    "an index after the window": (select, {"index": torch.tensor([0, 5])}, "index", "[0, 5]", "0 to 4"),
    "an index below 0": (select, {"index": torch.tensor([-1, 4])}, "index", "[-1, 4]", "0 to 4"),
    "an index of floats": (select, {"index": torch.tensor([0.0, 1.0])}, "index", "torch.float32", "torch.int64"),
    "an index for one head": (select, {"index": torch.tensor([0])}, "k", "(2, 9, 2)", "(2, 9, 1)"),
    "one bias": (select, {"bias": torch.zeros(1)}, "bias", "(1,)", "(2,)"),
    "a bias elsewhere": (select, {"bias": torch.zeros(2, device="meta")}, "bias", "meta", "cpu"),
    "an even window": (select, {"window": 6}, "window", "(6,)", "odd sizes"),
    "half a window": (select, {"window": 2.5}, "window", "2.5", "an integer of at least 1"),
    "a window of three sizes": (select, {"window": (3, 3, 3)}, "window", "(3, 3, 3)", "two of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case):
    call, change, argument, shown, allowed = WRONG[case]
    with refused(argument, shown, allowed):
        call(**change)


@pytest.mark.parametrize("call, window", [(conv, {"r": torch.zeros(2, 3, 3)}), (select, {"window": (3, 3)})])
def test_shapes_of_images_that_do_not_fit(call, window):
    assert call(**window, spatial_shape=(1, 9)).shape == (2, 9, 4)  # smaller than the window
    for shape in ((2, 4), (9,), (3, 3, 1)):
        with refused("spatial_shape", str(shape), "(height, width) of 9 tokens"):
            call(**window, spatial_shape=shape)
    with refused("spatial_shape", "None with a window of (3, 3)", "(height, width)"):
        call(**window)
    with refused("spatial_shape", "(3, 3) with a window of (5,)", "None with a window of one"):
        call(**IMAGE)
    with refused("spatial_shape", "causal=True", "causal=False"):
        call(**window, **IMAGE, causal=True)


def test_even_windows_of_causal_sequences_are_allowed():
    assert conv(torch.zeros(2, 4), causal=True).shape == (2, 9, 4)
    assert select(window=6, causal=True).shape == (2, 9, 4)


def test_a_state_of_another_window():
    _, state = conv(causal=True, return_state=True)
    assert conv(causal=True, initial_state=state).shape == (2, 9, 4)
    with refused("initial_state['k']", "5 of 9 tokens", "the last 6"):
        conv(torch.zeros(2, 6), causal=True, initial_state=state)
    for option in ({"initial_state": state}, {"return_state": True}):
        with refused("initial_state and return_state", "causal=False", "only with causal=True"):
            conv(**option)
