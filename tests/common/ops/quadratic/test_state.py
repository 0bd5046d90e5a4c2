"""The state of causal gau_attention, every token so far: pieces, padding in between, beams, what is refused."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import gau_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_close


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
