"""Linear attention against its literal reference, and its state."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import linear_attention
from common.ops.linear.reference import linear_attention_reference
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map
from tests.common.inputs import SIDES, doubled, padding, qkv
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def assert_agrees(inputs, chunk_size=64, **options) -> None:
    exact = doubled(*inputs)
    out = linear_attention(*inputs, chunk_size=chunk_size, **options)
    expected = linear_attention_reference(*exact, **options)
    assert_close("out", out, expected.to(out.dtype))
    for name, actual, wanted in zip("qkv", gradients(out, inputs), gradients(expected, exact)):
        assert_close(f"gradient of {name}", actual, wanted.to(out.dtype))


@pytest.mark.parametrize("phi", FEATURE_MAPS)
@pytest.mark.parametrize("side", SIDES)
@causality
def test_every_mask_and_feature_map_agrees(causal, side, phi):
    mask = padding(side, 3, 19)
    options = {"causal": causal, "phi": phi, "query_padding_mask": mask}
    assert_agrees(qkv(19, batch=3), chunk_size=4, key_padding_mask=mask, **options)
    assert_agrees(qkv(19, batch=3), chunk_size=4, key_padding_mask=padding("right", 3, 19), **options)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127])
def test_causal_agrees_at_any_length(length):
    assert_agrees(qkv(length, batch=1, d=7, e=5), causal=True)


@pytest.mark.parametrize("n, m", [(1, 9), (9, 1), (33, 20)])
def test_cross_attention_agrees(n, m):
    assert_agrees(qkv(n, m, d=2, e=4))


@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_agrees_with_the_float64_reference(dtype, causal):
    mask = padding("left", 2, 70)
    assert_agrees(qkv(70, dtype=dtype), causal=causal, key_padding_mask=mask, query_padding_mask=mask)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
@causality
def test_what_stands_in_padding_never_leaks(causal, poison):
    mask = padding("all", 3, 19)
    options = {"causal": causal, "key_padding_mask": mask, "query_padding_mask": mask, "chunk_size": 8}
    clean = qkv(19, batch=3, dtype=torch.float32)
    poisoned = [x.detach().masked_fill(mask[:, None, :, None], poison).requires_grad_() for x in clean]
    out, expected = linear_attention(*poisoned, **options), linear_attention(*clean, **options)
    assert torch.equal(out, expected)
    assert (out[0] == 0).all()
    for actual, wanted in zip(gradients(out, poisoned), gradients(expected, clean)):
        assert torch.equal(actual, wanted)


@hypothesis.given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    side=st.sampled_from(SIDES),
    chunk_size=st.integers(1, 10),
)
def test_any_pieces_give_the_whole(pieces, side, chunk_size):
    tokens = sum(pieces)
    inputs, mask = qkv(tokens), padding(side, 2, tokens)
    whole = linear_attention(*inputs, causal=True, key_padding_mask=mask, query_padding_mask=mask)
    outputs, state = [], None
    for part in torch.arange(tokens).split(pieces):
        masks = dict.fromkeys(("key_padding_mask", "query_padding_mask"), None if mask is None else mask[:, part])
        q, k, v = (x[:, :, part] for x in inputs)
        options = {"chunk_size": chunk_size, "initial_state": state, "return_state": True}
        out, state = linear_attention(q, k, v, causal=True, **masks, **options)
        outputs.append(out)
    out = torch.cat(outputs, dim=2)
    assert_close("out", out, whole)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "sum_k": (2, 2, 5),
        "sum_kv": (2, 2, 5, 3),
    }
    for name, actual, wanted in zip("qkv", gradients(out, inputs), gradients(whole, inputs)):
        assert_close(f"gradient of {name}", actual, wanted)


def test_the_future_does_not_touch_a_bit_of_the_past():
    q, k, v = qkv(40, dtype=torch.float32)
    out = linear_attention(q, k, v, causal=True, chunk_size=16)
    for t in (1, 15, 16, 17, 39):
        changed = [torch.cat([x[:, :, :t], 100 * torch.randn_like(x[:, :, t:])], dim=2) for x in (q, k, v)]
        assert torch.equal(linear_attention(*changed, causal=True, chunk_size=16)[:, :, :t], out[:, :, :t])


def test_every_row_is_an_average_of_the_values():
    q, k, v = qkv(12)
    out = linear_attention(q, k, torch.ones_like(v), causal=True)
    assert_close("average of ones", out, torch.ones_like(out), 1e-5)


def test_feature_maps_are_what_they_are_called_and_positive():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert_close("sigmoid", feature_map(x, "sigmoid"), 1 / (1 + (-x).exp()))
    assert_close("elu+1", feature_map(x, "elu+1"), torch.where(x > 0, x + 1, x.exp()))
    assert_close("relu", feature_map(x, "relu"), x.clamp(min=0) + 1e-6)
    assert all((feature_map(x, phi) > 0).all() for phi in FEATURE_MAPS)
