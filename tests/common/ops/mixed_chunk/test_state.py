"""The state of causal mixed chunk attention: pieces across chunk boundaries, rows in different phases, beams."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import mixed_chunk_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import BIASES, bias_like, mixed_chunk_inputs
from tests.common.refusals import refused
from tests.compare import assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")
SUMS = ("sum_kv", "ring", "block")


def in_pieces(inputs, pieces, mask=None, state=None, **options):
    """Output and last state of ``inputs`` given as consecutive ``pieces`` of these lengths, each padded by ``mask``."""
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


@pytest.mark.parametrize("apart", [0, 1, 5], ids=lambda n: f"rows_{n}_apart")
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 34, 48])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("terms", [{}, {"local": False}, {"linear": False}], ids=["both", "linear", "local"])
def test_steps_of_rows_that_are_at_different_places(terms, bias, chunk_size, apart):
    """Without a mask: the rows' prompts had different lengths. Over three chunks, so that blocks of slots change."""
    tokens, prompt = 2 * chunk_size + 40, 9
    inputs = mixed_chunk_inputs(tokens, heads=2)
    options = {"chunk_size": chunk_size, "bias": bias_like(bias, chunk_size, 2), **terms}
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[0, :apart] = True
    whole = mixed_chunk_attention(*inputs, causal=True, key_padding_mask=mask, **options)
    out, state = in_pieces([x[:, :, :prompt] for x in inputs], [prompt], mask[:, :prompt], **options)
    rest, state = in_pieces([x[:, :, prompt:] for x in inputs], [1] * (tokens - prompt), state=state, **options)
    assert_close("out", torch.cat([out, rest], dim=2), whole)
    assert_states_agree(state, in_pieces(inputs, [tokens], mask, **options)[1])


@pytest.mark.parametrize("tokens", [1, 7])
def test_padding_leaves_the_state_as_it_was(tokens):
    _, before = in_pieces(mixed_chunk_inputs(20), [20], chunk_size=6)
    nothing = torch.ones(2, tokens, dtype=torch.bool)
    out, after = in_pieces(mixed_chunk_inputs(tokens, seed=1), [tokens], nothing, state=before, chunk_size=6)
    assert (out == 0).all()
    for name, tensor in before.items():
        assert_close(name, after[name].double(), tensor.double(), 1e-14)


@pytest.mark.parametrize("pieces", [[1] * 10, [4, 6]], ids=str)
def test_the_gradient_flows_through_the_initial_state(pieces):
    inputs = mixed_chunk_inputs(30)
    _, state = in_pieces([x[:, :, :20] for x in inputs], [20], chunk_size=18)
    leaves = {name: tensor.detach().requires_grad_(name in SUMS) for name, tensor in state.items()}
    out, _ = in_pieces([x[:, :, 20:] for x in inputs], pieces, state=leaves, chunk_size=18)
    found = gradients(out, [leaves[name] for name in SUMS])
    assert all((gradient != 0).any() for gradient in found)
    # Carried back to the first piece, they are the gradients of the whole; its queries are not in the state.
    keys = [inputs[i] for i in (1, 3, 4)]
    first = torch.autograd.grad([state[name] for name in SUMS], keys, found)
    whole = mixed_chunk_attention(*inputs, causal=True, chunk_size=18)[:, :, 20:]
    for name, actual, expected in zip(("k_quad", "k_lin", "v"), first, gradients(whole, keys)):
        assert_close(f"gradient of {name}", actual[:, :, :20], expected[:, :, :20])


def test_steps_in_half_precision_do_not_drift():
    """The state stays float32, so 300 steps are as good as one call."""
    inputs = [x.detach() for x in mixed_chunk_inputs(300, dtype=torch.bfloat16)]
    out, _ = in_pieces(inputs, [1] * 300, chunk_size=16)
    assert_close("out", out, mixed_chunk_attention(*inputs, causal=True, chunk_size=16))


def test_states_that_do_not_fit_are_refused():
    inputs = [x.detach() for x in mixed_chunk_inputs(3, dtype=torch.float32)]
    options = {"causal": True, "chunk_size": 6}
    _, state = mixed_chunk_attention(*inputs, return_state=True, **options)

    def given(changed, **more):
        return mixed_chunk_attention(*inputs, initial_state=changed, **{**options, **more})

    assert given(state).shape == (2, 2, 3, 3)
    for option in ({"initial_state": state}, {"return_state": True}):
        with refused("initial_state and return_state", "causal=False", "only with causal=True"):
            mixed_chunk_attention(*inputs, chunk_size=6, **option)
    for name, tensor in state.items():
        with refused("initial_state", "holds", name):
            given({other: x for other, x in state.items() if other != name})
        with pytest.raises(ValueError, match=rf"^initial_state\['{name}'\] is a int; allowed: a tensor"):
            given({**state, name: 1})
        with refused(f"initial_state['{name}']", str((1, *tensor.shape[1:])), str(tuple(tensor.shape))):
            given({**state, name: tensor[:1]})
        with refused(f"initial_state['{name}']", "torch.float16", str(tensor.dtype)):
            given({**state, name: tensor.half()})
        with refused(f"initial_state['{name}']", "meta", "cpu"):
            given({**state, name: tensor.to("meta")})
    with refused("initial_state", "extra", "sum_kv"):
        given({**state, "extra": state["ring"]})
    with refused("initial_state", "tuple", "sum_kv"):
        given(tuple(state.values()))
    _, state = in_pieces(inputs, [3], chunk_size=2)
    with refused("initial_state['ring']", "(2, 2, 2, 11)", "(2, 2, 7, 11)"):
        given({**state, "count": state["count"] + 6}, chunk_size=7)
