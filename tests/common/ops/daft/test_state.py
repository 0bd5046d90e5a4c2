"""DAFT continued from its state equals DAFT of the whole sequence, however it is cut, with padding on any side."""

import functools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from common.ops import daft_conv, daft_full
from tests.common.inputs import SIDES, padding
from tests.common.ops.daft.formulas import daft_inputs, filter_bias, normal, written_out
from tests.compare import assert_close

OPS = {
    "full": (daft_full, lambda: normal(40, 40, seed=3)),
    "conv": (daft_conv, lambda: normal(4, 6, seed=3)),
    "local": (functools.partial(daft_conv, local_only=True), lambda: normal(4, 6, seed=3)),
}
names = pytest.mark.parametrize("name", OPS)


def in_pieces(op, inputs, w, mask, cuts):
    """Outputs of all the pieces between ``cuts``, and the last state."""
    state, outputs = None, []
    for start, stop in zip(cuts, cuts[1:]):
        part = [None if x is None else x[:, start:stop] for x in inputs]
        masked = None if mask is None else mask[:, start:stop]
        out, state = op(*part, w, causal=True, key_padding_mask=masked, initial_state=state, return_state=True)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


@names
@hypothesis.given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    side=st.sampled_from(SIDES),
    window=st.integers(1, 30),
    gated=st.booleans(),
)
@hypothesis.settings(max_examples=40)
def test_any_pieces_give_the_whole_and_one_state(name, pieces, side, window, gated):
    tokens = sum(pieces)
    op, w = OPS[name][0], normal(tokens, tokens, seed=3) if name == "full" else normal(4, window, seed=3)
    inputs, mask = daft_inputs(tokens), padding(side, 2, tokens)
    inputs = inputs if gated else [None, *inputs[1:]]
    cuts = [0, *torch.tensor(pieces).cumsum(0).tolist()]
    out, state = in_pieces(op, inputs, w, mask, cuts)
    assert_close("out", out, op(*inputs, w, causal=True, key_padding_mask=mask))
    _, whole = in_pieces(op, inputs, w, mask, [0, tokens])
    assert state.keys() == whole.keys()
    for entry, tensor in whole.items():
        if tensor.is_floating_point():
            # A mean over no tokens has no weight, and may be any number.
            factor = (whole["log_weight"] > -1e30).unsqueeze(-1) if entry == "mean" else torch.ones(())
            assert_close(entry, state[entry] * factor, tensor * factor)
        else:
            assert torch.equal(state[entry], tensor)


@pytest.mark.parametrize("cuts", [range(21), [0, 20], [0, 13, 20]], ids=["steps", "whole", "mixed"])
def test_a_window_alone_remembers_nothing_before_it(cuts):
    """The two sums stay empty, and tokens that have left the window change no later output."""
    op, inputs, r = OPS["local"][0], [x.detach() for x in daft_inputs(20)], normal(4, 6).detach()
    _, state = in_pieces(op, inputs, r, None, list(cuts))
    _, empty = in_pieces(op, [x[:, :1] for x in inputs], r, None, [0, 1])
    for entry in ("mean", "log_weight"):
        assert torch.equal(state[entry], empty[entry])
    changed = [torch.cat([x[:, :14] + 3.0, x[:, 14:]], dim=1) for x in inputs]  # the window holds tokens 14 to 19
    _, other = in_pieces(op, changed, r, None, list(cuts))
    assert all(torch.equal(other[entry], x) for entry, x in state.items())


@names
@pytest.mark.parametrize("mode", ["steps", "pieces"])
def test_large_keys_and_biases(mode, name):
    """In float32, keys of ±100 with biases of ±50; small keys before and after large ones."""
    op, tokens = OPS[name][0], 60
    signs = torch.where(torch.arange(tokens) // 7 % 2 == 0, 1.0, -1.0)
    v = normal(1, tokens, 4, dtype=torch.float32).detach()
    cuts = list(range(tokens + 1)) if mode == "steps" else [0, 1, 25, 26, 50, 60]
    uniform = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0)) * 100 - 50
    w = uniform if name == "full" else uniform[:4, :23]
    outside = -torch.inf if name == "local" else 0.0
    exact = w.double()[None] if name == "full" else filter_bias(w.double(), tokens, True, outside=outside)
    for sign in (signs, -signs):
        k = (sign * 100)[None, :, None].expand(1, tokens, 4)
        out, _ = in_pieces(op, [None, k, v], w, None, cuts)
        expected = written_out(None, k.double(), v.double(), exact, True)
        error = (out - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
        assert error.max() <= 1e-3


def test_a_step_of_daft_full_forms_one_row_of_its_bias():
    """Matrix products grow with the tokens seen, not with their square."""
    w, products = (normal(200, 6, seed=3), normal(200, 6, seed=4)), []
    for seen in (50, 100):
        _, state = daft_full(*daft_inputs(seen, 4), w, causal=True, return_state=True)
        with FlopCounterMode(display=False) as counter:
            daft_full(*daft_inputs(1, 4), w, causal=True, initial_state=state, return_state=True)
        products.append(counter.get_total_flops())
    assert 0 < products[1] < 2.1 * products[0]
