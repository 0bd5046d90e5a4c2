"""The state of causal gau_attention, every token so far: pieces, padding in between, beams, what is refused."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import gau_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_close, gradients


def in_pieces(inputs, pieces, mask=None, bias=None, **options):
    """Output and last state of ``inputs`` in ``pieces`` of these lengths; ``bias(m)`` is that of m tokens."""
    outputs, state, start = [], None, 0
    for length in pieces:
        part = slice(start, start + length)
        start += length
        out, state = gau_attention(
            *(x[..., part, :] for x in inputs),
            causal=True,
            key_padding_mask=None if mask is None else mask[:, part],
            bias=None if bias is None else bias(start),
            initial_state=state,
            return_state=True,
            **options,
        )
        outputs.append(out)
    assert start == inputs[0].shape[-2]
    return torch.cat(outputs, dim=-2), state


def prefix_of(bias):
    """The bias of the first m of its tokens: the middle of a vector, the corner of a matrix."""
    if bias is None:
        return None
    if bias.shape[-1] % 2:  # 2n-1 distances; lengths in these tests are even
        middle = bias.shape[-1] // 2
        return lambda m: bias[..., middle - m + 1 : middle + m]
    return lambda m: bias[..., :m, :m]


@pytest.mark.parametrize("pieces", [[1] * 20, [20], [7, 13], [1, 9, 1, 1, 8]], ids=str)
@pytest.mark.parametrize("side", ["none", "left", "right", "holes", "all"])
@pytest.mark.parametrize("form", BIASES)
def test_any_pieces_give_the_output_and_gradients_of_the_whole(form, side, pieces):
    inputs, mask, bias = qkv(20), padding(side, 2, 20), bias_like(form, 20)
    for options in ({"divisor": 2.0}, {"kernel": "softmax"}):
        whole = gau_attention(*inputs, causal=True, key_padding_mask=mask, bias=bias, **options)
        out, _ = in_pieces(inputs, pieces, mask, prefix_of(bias), **options)
        assert_close("out", out, whole)
        leaves = [*inputs] if bias is None else [*inputs, bias]
        for name, actual, wanted in zip(("q", "k", "v", "bias"), gradients(out, leaves), gradients(whole, leaves)):
            assert_close(f"gradient of {name}", actual, wanted)


@hypothesis.given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    side=st.sampled_from(["none", "left", "holes", "all"]),
    kernel=st.sampled_from(SCORE_KERNELS),
    divisor=st.sampled_from([None, 3.0]),
)
@hypothesis.settings(max_examples=40)
def test_any_cut_gives_the_whole(pieces, side, kernel, divisor):
    tokens = sum(pieces)
    inputs, mask = [x[:, 0] for x in qkv(tokens)], padding(side, 2, tokens)
    options = {"kernel": kernel, "divisor": divisor}
    out, state = in_pieces(inputs, pieces, mask, **options)
    assert_close("out", out, gau_attention(*inputs, causal=True, key_padding_mask=mask, **options))
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    assert shapes == {"k": (2, 1, tokens, 5), "v": (2, 1, tokens, 3), "padding_mask": (2, tokens)}


def test_a_beam_reorder_is_an_index_select_of_dimension_0():
    order = torch.tensor([2, 0, 0, 1])
    first, rest, mask = qkv(8, batch=3), qkv(5, batch=4, seed=1), padding("left", 3, 8)
    _, state = gau_attention(*first, causal=True, key_padding_mask=mask, return_state=True)
    state = {name: tensor.index_select(0, order) for name, tensor in state.items()}
    out, _ = gau_attention(*rest, causal=True, initial_state=state, return_state=True)
    whole = [torch.cat([x.index_select(0, order), y], dim=2) for x, y in zip(first, rest)]
    whole_mask = torch.nn.functional.pad(mask.index_select(0, order), (0, 5))
    assert_close("out", out, gau_attention(*whole, causal=True, key_padding_mask=whole_mask)[:, :, 8:])


def test_poison_in_a_padded_token_of_the_state_does_not_come_back():
    inputs, mask = qkv(9), padding("left", 2, 9)
    expected, _ = in_pieces(inputs, [5, 1, 3], mask)
    poisoned = [x.detach().masked_fill(mask[:, None, :, None], float("nan")).requires_grad_() for x in inputs]
    out, _ = in_pieces(poisoned, [5, 1, 3], mask)
    assert torch.equal(out, expected)
    assert all(torch.equal(*pair) for pair in zip(gradients(out, poisoned), gradients(expected, inputs)))


def test_the_given_state_stays_as_it_is_and_half_precision_stays_half():
    inputs = qkv(6, dtype=torch.bfloat16)
    _, state = gau_attention(*inputs, causal=True, return_state=True)
    assert state["k"].dtype == state["v"].dtype == torch.bfloat16
    before = {name: tensor.clone() for name, tensor in state.items()}
    gau_attention(*inputs, causal=True, initial_state=state)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items()) and len(state) == len(before)


def test_states_that_do_not_fit_are_refused():
    inputs = [x.detach() for x in qkv(3, d=4)]
    _, state = gau_attention(*inputs, causal=True, return_state=True)

    def given(changed):
        return gau_attention(*inputs, causal=True, initial_state=changed)

    assert given(state).shape == (2, 2, 3, 3)
    for option in ({"initial_state": state}, {"return_state": True}):
        with refused("initial_state and return_state", "causal=False", "only with causal=True"):
            gau_attention(*inputs, **option)
    for name in state:
        with refused("initial_state", "holds", name):
            given({other: x for other, x in state.items() if other != name})
        with pytest.raises(ValueError, match=rf"^initial_state.*{name}.*; allowed: "):
            given({**state, name: 1})
        with refused(f"initial_state['{name}']", "(1, ", ""):
            given({**state, name: state[name][:1]})
        with refused(f"initial_state['{name}']", "int32", str(state[name].dtype)):
            given({**state, name: state[name].int()})
    with refused("initial_state", "extra", "padding_mask"):
        given({**state, "extra": state["k"]})
    with refused("initial_state", "tuple", "padding_mask"):
        given(tuple(state.values()))
    with refused("initial_state['k']", "(2, 2, 2, 4)", "(2, 2, 3, 4)"):
        given({**state, "k": state["k"][:, :, 1:]})
    with refused("initial_state['k']", "meta", "cpu"):
        given({**state, "k": state["k"].to("meta")})
    with refused("bias", "(5,)", "the number of tokens = 6 and 2 heads: (11,)"):
        gau_attention(*inputs, causal=True, initial_state=state, bias=torch.zeros(5))
