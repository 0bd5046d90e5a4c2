"""Options and tensors that single functions alone take, and the shared checks; the contract has all mechanisms."""

import math

import pytest
import torch

from common.ops import (
    flow_attention_map,
    flow_attention_weights,
    gated_delta_attention,
    hedgehog_attention,
    lolcats_attention,
    retention_attention,
    rfa_attention,
)
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


MAPS = {
    f"{name}_{part}": torch.zeros(3, 6, *([4] if part == "weight" else []))
    for name in ("query", "key")
    for part in ("weight", "bias")
}
FEWER = {"key_weight": torch.zeros(3, 2, 4), "key_bias": torch.zeros(3, 2)}
RFA = {"directions": torch.zeros(3, 6, 4), "causal": True}
META = torch.zeros(2, 3, 5, device="meta")


@pytest.mark.parametrize(
    "function, arguments, argument, given, allowed",
    [
        (retention_attention, {"score_norm": 1}, "score_norm", "1", "True or False"),
        (rfa_attention, {**RFA, "log_gate": torch.zeros(2, 3, 4)}, "log_gate", "(2, 3, 4)", "(2, 3, 5)"),
        (hedgehog_attention, {**MAPS, **FEWER}, "query_weight", "(3, 6, 4) and key_weight (3, 2, 4)", "equally many"),
        (lolcats_attention, {**MAPS, "window": 3, "window_gate": torch.zeros(2)}, "window_gate", "(2,)", "(3,)"),
        (gated_delta_attention, {"causal": True, "beta": META}, "beta", "meta", "cpu"),
    ],
)
def test_what_one_function_takes(function, arguments, argument, given, allowed):
    with refused(argument, given, allowed):
        function(**tensors(), **arguments)


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
