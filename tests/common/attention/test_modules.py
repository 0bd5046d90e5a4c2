"""The attention modules beyond the contract: names, repr, and extra features of individual modules."""

import pytest
import torch

from common.attention import build_attention
from common.ops import flow_attention_map, flow_attention_weights
from tests.common.attention.build import SHAPE, build
from tests.common.inputs import padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_close

FLOW_OPTIONS = {
    "form": "paper",
    "clamp": 5.0,
    "phi": "elu+1",
    "competition": "sigmoid",
    "allocation": "softmax",
    "chunk_size": 8,
}


def masks_for(tokens: int, side: str = "left") -> dict:
    return dict.fromkeys(("key_padding_mask", "query_padding_mask"), padding(side, 2, tokens))


def test_a_module_prints_its_facts_and_options():
    module = build_attention("rfa", causal=True, **SHAPE, features=8, floor=0.5)
    facts = "causal=True, num_heads=2, head_dim=4"
    assert repr(module) == f"RfaAttention({facts}, features=8, floor=0.5, chunk_size=64)"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flow_shows_its_weights_and_its_map(causal):
    q, k, v = qkv(19)
    module, masks = build_attention("flow", causal=causal, **FLOW_OPTIONS), masks_for(19)
    expected = flow_attention_weights(q, k, causal=causal, **masks, **FLOW_OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(module.weights(q, k, **masks), expected))
    attention_map = flow_attention_map(q, k, causal=causal, **masks, **FLOW_OPTIONS)
    assert torch.equal(module.attention_map(q, k, **masks), attention_map)
    assert_close("map @ v", attention_map @ v, module(q, k, v, **masks))


def test_a_name_that_there_is_not_is_refused():
    with refused("attention", "'flows'", "'flow'"):
        build_attention("flows")


@pytest.mark.parametrize("name", ["combiner", "mixed_chunk"])
def test_heads_of_an_odd_number_of_channels_are_refused_where_they_are_rotated(name):
    with refused("head_dim", "5", "even"):
        build(name, head_dim=5)


@pytest.mark.parametrize("name", ["daft_full", "linformer", "synthesizer"])
def test_a_table_that_would_fill_all_memory_is_refused(name):
    with refused("max_tokens", "1,000,000,000,000", "4,294,967,296"):
        build(name, max_tokens=10**12)


@pytest.mark.parametrize("window", [4, (5, 4), (5, 5, 5), ()], ids=str)
def test_windows_of_daft_conv_are_one_odd_number_or_two(window):
    with refused("window", repr(window), ""):
        build("daft_conv", window=window)
