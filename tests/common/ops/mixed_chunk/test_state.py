"""The state of causal mixed chunk attention: pieces across chunk boundaries, rows at different offsets, beams."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import mixed_chunk_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, mixed_chunk_inputs
from tests.compare import assert_close

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")


def in_pieces(inputs, pieces, mask=None, state=None, **options):
    """Output and last state of ``inputs`` given in consecutive ``pieces`` of these lengths, each padded by ``mask``."""
    outputs, start = [], 0
    for length in pieces:
        part = slice(start, start + length)
        start += length
        out, state = mixed_chunk_attention(
            *(x[..., part, :] for x in inputs),
            causal=True,
            key_padding_mask=None if mask is None else mask[:, part],
            initial_state=state,
            return_state=True,
            **options,
        )
        outputs.append(out)
    assert start == inputs[0].shape[-2]
    return torch.cat(outputs, dim=-2), state


def assert_states_agree(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, actual[name].double(), tensor.double())


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_cut_mask_and_option_gives_the_whole(data):
    pieces = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), "pieces")
    tokens = sum(pieces)
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    mask = data.draw(st.none() | st.lists(rows, min_size=2, max_size=2).map(torch.tensor), "mask")
    chunk_size, heads = data.draw(st.integers(1, 10), "chunk_size"), data.draw(st.sampled_from([None, 2]), "heads")
    options = {
        "chunk_size": chunk_size,
        "kernel": data.draw(st.sampled_from(SCORE_KERNELS), "kernel"),
        "bias": bias_like(data.draw(st.sampled_from(BIASES), "bias"), chunk_size, heads or 1),
        **data.draw(st.sampled_from([{}, {"local": False}, {"linear": False}]), "terms"),
    }
    inputs = mixed_chunk_inputs(tokens, heads=heads, seed=data.draw(st.integers(0, 99), "seed"))
    whole = mixed_chunk_attention(*inputs, causal=True, key_padding_mask=mask, **options)
    _, last = in_pieces(inputs, [tokens], mask, **options)
    out, state = in_pieces(inputs, pieces, mask, **options)
    assert_close("out", out, whole)
    assert_states_agree(state, last)


@pytest.mark.parametrize("apart", [0, 5], ids=lambda n: f"rows_{n}_apart")
@pytest.mark.parametrize("chunk_size", [1, 5, 34])
@pytest.mark.parametrize("bias", ["no bias", "matrices"])
@pytest.mark.parametrize("terms", [{}, {"local": False}, {"linear": False}], ids=["both", "linear", "local"])
def test_steps_of_rows_that_are_at_different_places(terms, bias, chunk_size, apart):
    """No mask: the rows' prompts had different lengths. Decoding spans three chunks, so that blocks of slots change."""
    tokens, prompt = 2 * chunk_size + 40, 9
    inputs = mixed_chunk_inputs(tokens, heads=2)
    options = {"chunk_size": chunk_size, "bias": bias_like(bias, chunk_size, 2), **terms}
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[0, :apart] = True
    whole = mixed_chunk_attention(*inputs, causal=True, key_padding_mask=mask, **options)
    out, state = in_pieces([x[:, :, :prompt] for x in inputs], [prompt], mask[:, :prompt], **options)
    steps, state = in_pieces([x[:, :, prompt:] for x in inputs], [1] * (tokens - prompt), state=state, **options)
    assert_close("out", torch.cat([out, steps], dim=2), whole)
    assert_states_agree(state, in_pieces(inputs, [tokens], mask, **options)[1])
