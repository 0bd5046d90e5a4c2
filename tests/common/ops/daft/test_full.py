"""DAFT-full equals equations 5 and 6, whatever the size of keys and biases, and creates no T x T x d tensor."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import daft_full
from common.ops.daft.full_reference import daft_full_reference
from tests.common.inputs import SIDES, padding
from tests.common.ops.daft.formulas import (
    assert_agrees,
    daft_inputs,
    normal,
    written_out,
)
from tests.common.properties import LargestTensor
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def daft_full_inputs(tokens, **options):
    return daft_inputs(tokens, 4, **options)


@causality
@pytest.mark.parametrize("side", ["none", "holes", "all"])
@pytest.mark.parametrize("tokens", [1, 8, 31])
def test_forward_and_gradients(tokens, side, causal):
    """w longer than the input, as a matrix and as factors; with and without the gate."""
    inputs, mask = daft_full_inputs(tokens), padding(side, 2, tokens)
    options = {"causal": causal, "key_padding_mask": mask}
    matrix, factors = normal(tokens + 2, tokens + 2, seed=3), (normal(tokens + 2, 3), normal(tokens + 2, 3, seed=4))
    for w, leaves in ((matrix, [matrix]), (factors, list(factors))):
        expected = daft_full_reference(*inputs, w, **options)
        assert_agrees(daft_full(*inputs, w, **options), expected, inputs + leaves)
    bare = daft_full(None, *inputs[1:], matrix, **options)
    assert_agrees(bare, daft_full_reference(None, *inputs[1:], matrix, **options), [*inputs[1:], matrix])


@hypothesis.given(tokens=st.integers(1, 70), extra=st.integers(0, 3), causal=st.booleans(), side=st.sampled_from(SIDES))
@hypothesis.settings(max_examples=40)
def test_any_length(tokens, extra, causal, side):
    """Compared with explicit weights, row by row without the padding."""
    inputs, w, mask = daft_full_inputs(tokens), normal(tokens + extra, tokens + extra, seed=3), padding(side, 2, tokens)
    out = daft_full(*inputs, w, causal=causal, key_padding_mask=mask)
    for b in range(2):
        real = slice(None) if mask is None else ~mask[b]
        alone = [x[b : b + 1, real] for x in inputs]
        count = alone[0].shape[1]
        if count:
            expected = written_out(*alone, w[None, :count, :count], causal)
            assert_close(f"row {b}", out[b : b + 1, real], expected)


@causality
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_constants_added_to_all_keys_and_to_a_row_of_biases_cancel(side, causal):
    """Padding is included, since its keys must not serve as the reference."""
    (q, k, v), w = daft_full_inputs(37), normal(37, 37, seed=3)
    options = {"causal": causal, "key_padding_mask": padding(side, 2, 37)}
    expected = daft_full(q, k, v, w, **options)
    for constant in (-1000.0, 1000.0):
        rows = constant * torch.linspace(-1, 1, 37, dtype=torch.float64)[:, None]
        assert_close("out", daft_full(q, k + constant, v, w + rows, **options), expected)


@causality
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_no_tensor_is_tokens_by_tokens_by_channels(masked, causal):
    """T = 512, d = 48: T² entries of w are allowed, and 8 logits for each token and channel."""
    tokens, channels = 512, 48
    inputs = daft_inputs(tokens, channels, batch=1, channels=channels, dtype=torch.float32)
    w = normal(tokens, tokens, seed=3, dtype=torch.float32)
    mask = (torch.arange(tokens) < 100)[None] if masked else None
    with LargestTensor() as seen:
        out = daft_full(*inputs, w, causal=causal, key_padding_mask=mask)
        torch.autograd.grad(out.sum(), [*inputs, w])
    assert tokens * tokens <= seen.numel <= max(tokens * tokens, 8 * tokens * channels) * 1.01


# --- any range of keys and biases ------------------------------------------------------------------------------------

TOKENS, CHANNELS = 40, 3
RANGES = ("large key first", "both wide", "huge biases", "largest floats", "huge constant")


def wide_inputs(kind):
    """q, k, v (1, T, d) and w (T, T) in float32; keys of at most 100 unless stated otherwise."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    q, k, v = (normal(1, TOKENS, CHANNELS) for _ in range(3))
    if kind == "large key first":
        k = torch.full_like(k, -100.0)
        k[:, 0] = 100.0
        w = 60.0 * normal(TOKENS, TOKENS)
    elif kind == "both wide":
        k, w = (100.0 * k).clamp(-100.0, 100.0), 60.0 * normal(TOKENS, TOKENS)
    elif kind == "huge biases":
        k, w = (100.0 * k).clamp(-100.0, 100.0), 1e6 * normal(TOKENS, TOKENS)
    elif kind == "largest floats":
        k, w = (100.0 * k).clamp(-100.0, 100.0), 3.4e38 * normal(TOKENS, TOKENS).sign()
    else:  # a constant that float32 cannot add to a key without rounding the key
        w = torch.full((TOKENS, TOKENS), 1e8)
    return [x.requires_grad_() for x in (q, k, v, w)]


def exact_inputs(inputs, kind):
    """Copies in float64, with equivalent biases if float64 cannot add the given ones to a key either."""
    q, k, v, w = (x.detach().double() for x in inputs)
    w = 1e6 * w.sign() if kind == "largest floats" else w
    return [x.requires_grad_() for x in (q, k, v, w)]


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_range_of_keys_and_biases(causal, side, kind):
    """The output and all gradients are finite and match float64."""
    inputs, mask = wide_inputs(kind), padding(side, 1, TOKENS)
    exact = exact_inputs(inputs, kind)
    out = daft_full(*inputs, causal=causal, key_padding_mask=mask)
    expected = daft_full_reference(*exact, causal=causal, key_padding_mask=mask)
    assert_close("out", out.double(), expected, 2e-5)
    for name, actual, wanted in zip("qkvw", gradients(out, inputs), gradients(expected, exact)):
        assert torch.isfinite(actual).all(), name
        assert_close(f"gradient of {name}", actual.double(), wanted, 2e-4)


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("steps", [[1] * TOKENS, [7, 1, 20, 12]], ids=["one by one", "several at once"])
def test_any_range_when_decoding(steps, kind):
    inputs = wide_inputs(kind)
    expected = daft_full_reference(*exact_inputs(inputs, kind), causal=True).detach()
    q, k, v, w = (x.detach() for x in inputs)
    state, outputs = None, []
    for part in zip(*(x.split(steps, dim=1) for x in (q, k, v))):
        out, state = daft_full(*part, w, causal=True, initial_state=state, return_state=True)
        outputs.append(out)
    assert_close("out", torch.cat(outputs, dim=1).double(), expected, 2e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_range_beyond_float64_is_refused(causal):
    q, k, v, w = (x.detach() for x in wide_inputs("huge biases"))
    with pytest.raises(ValueError, match="keys.* 1400 .*position biases.*at most 600"):
        daft_full(q, k.sign() * 700.0, v, w, causal=causal)


def test_a_compiled_graph_refuses_what_float32_does_not_hold():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: daft_full(*x, causal=True), backend="aot_eager", fullgraph=True)
    usual = wide_inputs("huge constant")
    assert_close("out", compiled(*usual), daft_full(*usual, causal=True), 1e-5)
    with pytest.raises(RuntimeError, match="keys of a channel or the position biases"):
        compiled(*wide_inputs("both wide"))
