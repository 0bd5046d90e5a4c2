"""The state of causal Flow-Attention: prompts in pieces, one-token steps, beams, padding between tokens."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import flow_attention, flow_attention_weights
from common.ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

CAUSAL_COMPETITIONS = [name for name in COMPETITIONS if name != "softmax_heads"]


def in_pieces(inputs, pieces, mask=None, state=None, **options):
    """Output and last state of ``inputs`` given in consecutive ``pieces`` of these lengths, each padded by ``mask``."""
    outputs, start = [], 0
    for length in pieces:
        part = slice(start, start + length)
        part_mask = None if mask is None else mask[:, part]
        masks = {"key_padding_mask": part_mask, "query_padding_mask": part_mask}
        q, k, v = (x[:, :, part] for x in inputs)
        out, state = flow_attention(q, k, v, causal=True, initial_state=state, return_state=True, **masks, **options)
        outputs.append(out)
        start += length
    assert start == inputs[0].shape[2]
    return torch.cat(outputs, dim=2), state


def assert_states_agree(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, actual[name].double(), tensor.double())


def test_tensors_of_a_state_share_no_memory():
    """A beam search that reorders one of them in place must not change another."""
    _, whole = flow_attention(*qkv(20), causal=True, chunk_size=8, return_state=True)
    _, step = flow_attention(*qkv(1), causal=True, initial_state=whole, return_state=True)
    for state in (whole, step):
        assert len({x.untyped_storage().data_ptr() for x in state.values()}) == len(state)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_any_cut_mask_and_option_gives_the_whole(data):
    pieces = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), "pieces")
    tokens = sum(pieces)
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    mask = data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask")
    options = {
        "form": data.draw(st.sampled_from(list(FORMS)), "form"),
        "clamp": data.draw(st.sampled_from([None, 1.0, 5.0]), "clamp"),
        "competition": data.draw(st.sampled_from(CAUSAL_COMPETITIONS), "competition"),
        "allocation": data.draw(st.sampled_from(ALLOCATIONS), "allocation"),
        "chunk_size": data.draw(st.integers(1, 10), "chunk_size"),
    }
    inputs = qkv(tokens, seed=data.draw(st.integers(0, 99), "seed"))
    whole, last = in_pieces(inputs, [tokens], mask, **options)
    out, state = in_pieces(inputs, pieces, mask, **options)
    assert_close("out", out, whole)
    assert_states_agree(state, last)


@pytest.mark.parametrize("side", ["none", "left"])
def test_the_weights_after_a_state_are_those_of_the_whole_sequence(side):
    q, k, v = qkv(11)
    mask = padding(side, 2, 11)
    first, second = ((None, None) if mask is None else (mask[:, :7], mask[:, 7:]))[:2]
    whole = flow_attention_weights(q, k, causal=True, key_padding_mask=mask)
    _, state = flow_attention(*(x[:, :, :7] for x in (q, k, v)), causal=True, key_padding_mask=first, return_state=True)
    inputs = q[:, :, 7:], k[:, :, 7:]
    weights = flow_attention_weights(*inputs, causal=True, key_padding_mask=second, initial_state=state)
    for name, part, all_of_them in zip(("competition", "allocation"), weights, whole):
        assert_close(name, part, all_of_them[:, :, 7:], 1e-12)
    for wrong in ({}, {**state, "sum_k": state["sum_k"][:1]}, {**state, "sum_q": state["sum_q"].half()}):
        with pytest.raises(ValueError, match="initial_state"):
            flow_attention_weights(*inputs, causal=True, initial_state=wrong)
