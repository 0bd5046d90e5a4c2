"""Every wrong argument gives a ValueError that starts with its name and says what was given and what is allowed."""

import math

import pytest
import torch

from common.ops import flow_attention, flow_attention_map, flow_attention_weights, linear_attention
from common.ops.flow.options import flow_options
from common.ops.shared.checks import check_choice, check_padding_mask, check_positive_int, check_probability
from tests.common.refusals import WRONG_MASKS, refused, tensors

OPS = [flow_attention, linear_attention]
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


@pytest.mark.parametrize("case", WRONG_MASKS)
@pytest.mark.parametrize("argument", ["key_padding_mask", "query_padding_mask"])
def test_masks_that_do_not_fit(argument, case):
    mask, given, allowed = WRONG_MASKS[case]
    with refused(argument, given, allowed):
        flow_attention_weights(*list(tensors().values())[:2], **{argument: mask})


@pytest.mark.parametrize(
    "argument, given, allowed",
    [
        ("form", "Paper", "'paper', 'released', 'released_vision'"),
        ("form", None, "'paper'"),
        ("phi", "softplus", "'sigmoid', 'elu+1', 'relu'"),
        ("competition", "softmin", "'softmax', 'sigmoid', 'none'"),
        ("allocation", None, "'sigmoid', 'softmax', 'none'"),
        ("clamp", 0.0, "a number above 0, or None"),
        ("clamp", -1.0, "a number above 0, or None"),
        ("clamp", math.nan, "a number above 0, or None"),
        ("clamp", "5", "a number above 0, or None"),
        ("chunk_size", 0, "an integer of at least 1"),
        ("chunk_size", -64, "an integer of at least 1"),
        ("chunk_size", 6.4, "an integer of at least 1"),
        ("chunk_size", True, "an integer of at least 1"),
        ("chunk_size", None, "an integer of at least 1"),
    ],
)
def test_options_that_are_not_allowed(argument, given, allowed):
    inputs, option = tensors(), {argument: given}
    for call in (
        lambda: flow_attention(**inputs, **option),
        lambda: flow_attention(**inputs, causal=True, **option),
        lambda: flow_attention_weights(inputs["q"], inputs["k"], **option),
        lambda: flow_attention_map(inputs["q"], inputs["k"], **option),
    ):
        with refused(argument, repr(given), allowed):
            call()
    if argument != "chunk_size":
        with refused(argument, repr(given), allowed):
            flow_options(**option)
    if argument in ("phi", "chunk_size"):
        with refused(argument, repr(given), allowed):
            linear_attention(**inputs, **option)


@ops
def test_a_state_needs_causal(op):
    inputs = tensors()
    _, state = op(**inputs, causal=True, return_state=True)
    for option in ({"initial_state": state}, {"return_state": True}):
        with refused("initial_state and return_state", "causal=False", "only with causal=True"):
            op(**inputs, **option)


def test_maps_are_for_short_inputs():
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 9, 4)
    assert flow_attention_map(q, k, max_tokens=9).shape == (1, 1, 3, 9)
    for sinks, sources in ((q, k), (k, q)):
        with refused("q and k", f"{sinks.shape[2]} and {sources.shape[2]} tokens", "max_tokens=8"):
            flow_attention_map(sinks, sources, max_tokens=8)
    with refused("q", "(3, 4)", "4 dimensions"):
        flow_attention_map(q[0, 0], k)


def test_the_shared_checks_accept_what_is_allowed():
    check_choice("name", "a", ("a", "b"))
    check_positive_int("number", 1)
    check_probability("rate", 0.0)
    check_probability("rate", 0.999)
    check_padding_mask("mask", None, torch.ones(2, 3, 5, 4))
    check_padding_mask("mask", torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 3, 5, 4))


@pytest.mark.parametrize("rate", [1.0, -0.1, 2, math.nan, "0.1", None])
def test_probabilities_that_are_not_allowed(rate):
    with refused("rate", repr(rate), "at least 0 and below 1"):
        check_probability("rate", rate)
