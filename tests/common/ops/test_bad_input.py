"""Options and tensors of Flow-Attention's other functions, and the shared checks; the contract has all mechanisms."""

import math

import pytest
import torch

from common.ops import flow_attention_map, flow_attention_weights
from common.ops.flow.options import flow_options
from common.ops.shared.checks import check_choice, check_padding_mask, check_positive_int, check_probability
from tests.common.refusals import refused, tensors


@pytest.mark.parametrize("argument", ["key_padding_mask", "query_padding_mask"])
def test_masks_that_do_not_fit(argument):
    q, k, _ = tensors().values()
    for mask, shown in ((torch.zeros(2, 5), "torch.float32"), (torch.zeros(2, 4, dtype=torch.bool), "(2, 4)")):
        with refused(argument, shown, ""):
            flow_attention_weights(q, k, **{argument: mask})


@pytest.mark.parametrize(
    "argument, given, allowed",
    [
        ("form", "Paper", "'paper', 'released', 'released_vision'"),
        ("phi", "softplus", "'sigmoid', 'elu+1', 'relu'"),
        ("competition", "softmin", "'softmax', 'sigmoid', 'none'"),
        ("allocation", None, "'sigmoid', 'softmax', 'none'"),
        ("clamp", 0.0, "a number above 0, or None"),
        ("clamp", math.nan, "a number above 0, or None"),
    ],
)
def test_options_that_are_not_allowed(argument, given, allowed):
    q, k, _ = tensors().values()
    for call in (flow_attention_weights, flow_attention_map):
        with refused(argument, repr(given), allowed):
            call(q, k, **{argument: given})
    with refused(argument, repr(given), allowed):
        flow_options(**{argument: given})


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
    check_probability("rate", 0.999)
    check_padding_mask("mask", None, torch.ones(2, 3, 5, 4))
    check_padding_mask("mask", torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 3, 5, 4))


@pytest.mark.parametrize("rate", [1.0, -0.1, math.nan, "0.1", None])
def test_probabilities_that_are_not_allowed(rate):
    with refused("rate", repr(rate), "at least 0 and below 1"):
        check_probability("rate", rate)
