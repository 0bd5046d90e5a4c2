"""DAFT-full and DAFT-conv equal equations 5 and 7, step by step too, whatever the size of keys and biases."""

import sys
from typing import Callable, List, Optional

import pytest
import torch
from torch import Tensor

from common.ops import daft_conv, daft_full
from common.ops.daft_conv_reference import daft_conv_reference
from common.ops.daft_full_reference import daft_full_reference
from tests.common.inputs import SIDES, padding
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def _normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _inputs(tokens: int, heads: int = 4) -> List[Tensor]:
    return [_normal(2, tokens, 4), _normal(2, tokens, heads, seed=1), _normal(2, tokens, 4, seed=2)]


def _compare(actual: Tensor, expected: Tensor, leaves: List[Tensor]) -> None:
    assert_close("out", actual, expected)
    for leaf, mine, theirs in zip(range(len(leaves)), gradients(actual, leaves), gradients(expected, leaves)):
        assert_close(f"gradient {leaf}", mine, theirs, tolerance=1e-8)


@causality
@pytest.mark.parametrize("side", SIDES[:-1])
@pytest.mark.parametrize("tokens", [2, 8, 13, 31])
def test_daft_full_equals_equation_5(tokens: int, side: str, causal: bool) -> None:
    """Forward and gradients; w longer than the input, as a matrix and as its factors."""
    inputs, mask = _inputs(tokens), padding(side, 2, tokens)
    options = {"causal": causal, "key_padding_mask": mask}
    matrix, factors = _normal(tokens + 2, tokens + 2, seed=3), (_normal(tokens + 2, 3), _normal(tokens + 2, 3, seed=4))
    for w, leaves in ((matrix, [matrix]), (factors, list(factors))):
        _compare(daft_full(*inputs, w, **options), daft_full_reference(*inputs, w, **options), inputs + leaves)


@causality
@pytest.mark.parametrize("side", SIDES[:-1])
@pytest.mark.parametrize("direct", [0, 10**6], ids=["blocked", "direct"])
@pytest.mark.parametrize(("heads", "window"), [(1, 3), (2, 21), (4, 5), (2, 61)])
def test_daft_conv_equals_equation_7(
    heads: int, window: int, direct: int, side: str, causal: bool, monkeypatch
) -> None:
    """Forward and gradients of both causal forms, windows shorter and longer than blocks and than the input."""
    monkeypatch.setattr(sys.modules["common.ops.daft_conv"], "_DIRECT", direct)
    inputs, r, mask = _inputs(37, heads), _normal(heads, window, seed=3), padding(side, 2, 37)
    options = {"causal": causal, "key_padding_mask": mask}
    _compare(daft_conv(*inputs, r, **options), daft_conv_reference(*inputs, r, **options), [*inputs, r])


@pytest.mark.parametrize("window", [(3, 3), (5, 1), (11, 11)], ids=str)
@pytest.mark.parametrize("side", ["none", "holes"])
def test_daft_conv_of_images(side: str, window) -> None:
    """A raster that is not square, under filters smaller and larger than it; padding keeps its place."""
    inputs, r, mask = _inputs(12, 2), _normal(2, *window, seed=3), padding(side, 2, 12)
    options = {"spatial_shape": (3, 4), "key_padding_mask": mask}
    _compare(daft_conv(*inputs, r, **options), daft_conv_reference(*inputs, r, **options), [*inputs, r])


def _stepped(op: Callable, inputs: List[Tensor], w: Tensor, mask: Optional[Tensor], cuts: List[int]) -> Tensor:
    state, parts = None, []
    for start, stop in zip(cuts, cuts[1:]):
        part = [x[:, start:stop] for x in inputs]
        masked = None if mask is None else mask[:, start:stop]
        out, state = op(*part, w, causal=True, key_padding_mask=masked, initial_state=state, return_state=True)
        parts.append(out)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("cuts", [list(range(38)), [0, 1, 2, 20, 21, 37], [0, 37]], ids=["steps", "mixed", "whole"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["full", "conv"])
def test_continued_sequences_equal_whole_ones(name: str, side: str, cuts: List[int]) -> None:
    """Any cutting into calls, with padding on any side."""
    op, w = (daft_full, _normal(40, 40, seed=3)) if name == "full" else (daft_conv, _normal(4, 6, seed=3))
    inputs, mask = _inputs(37), padding(side, 2, 37)
    expected = op(*inputs, w, causal=True, key_padding_mask=mask)
    assert_close("out", _stepped(op, inputs, w, mask, cuts), expected)


def test_the_state_of_daft_conv_does_not_grow() -> None:
    """A window of tokens and two sums, the batch first in each."""
    inputs, r, sizes, state = _inputs(30, 2), _normal(2, 5), set(), None
    for i in range(30):
        part = [x[:, i : i + 1] for x in inputs]
        _, state = daft_conv(*part, r, causal=True, initial_state=state, return_state=True)
        sizes.add(sum(x.numel() for x in state.values()))
    assert len(sizes) == 1 and all(x.shape[0] == 2 for x in state.values())


@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["full", "conv", "conv-blocked"])
def test_large_keys_and_biases(name: str, dtype: torch.dtype, causal: bool, monkeypatch) -> None:
    """Keys of ±100, biases of ±50; every row is right, those too that see small keys while large ones come later."""
    op, reference = (daft_full, daft_full_reference) if name == "full" else (daft_conv, daft_conv_reference)
    if name == "conv-blocked":
        monkeypatch.setattr(sys.modules["common.ops.daft_conv"], "_DIRECT", 0)
    uniform = torch.rand(90, 90, generator=torch.Generator().manual_seed(0)) * 2 - 1
    late = torch.where(torch.arange(90) < 45, -1.0, 1.0)[None, :, None].expand(1, 90, 4)
    v = _normal(1, 90, 4).detach().to(dtype)
    for largest, spread in ((100.0, 1.0), (1.0, 50.0)):
        w = ((uniform if name == "full" else uniform[:4, :9]) * spread).to(dtype)
        for keys in (uniform[None, :, :4], late, -late):
            k = (keys * largest).to(dtype)
            actual = op(None, k, v, w, causal=causal).double()
            expected = reference(None, k.double(), v.double(), w.double(), causal=causal)
            error = (actual - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
            assert error.max() <= {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("name", ["full", "conv"])
def test_the_future_changes_nothing(name: str) -> None:
    """Earlier rows are equal whatever follows, to the rounding of what cancels, and have no gradient from it."""
    op, w = (daft_full, _normal(40, 40, seed=3)) if name == "full" else (daft_conv, _normal(4, 6, seed=3))
    inputs = _inputs(37)
    changed = [torch.cat([x[:, :20], x[:, 20:] + 7.0], dim=1) for x in inputs]
    out = op(*inputs, w, causal=True)
    assert_close("out", op(*changed, w, causal=True)[:, :20], out[:, :20], tolerance=1e-14)
    for gradient in torch.autograd.grad(out[:, :20].sum(), inputs):
        assert gradient[:, 20:].abs().max() == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: daft_full(q, k, v, torch.zeros(8, 8)), "9 tokens; allowed by w: at most 8"),
        (lambda q, k, v: daft_full(q, k, v, torch.zeros(9, 8)), r"w has shapes \[\(9, 8\)\]; allowed"),
        (lambda q, k, v: daft_full(q, k[..., :2], v, torch.zeros(9, 9)), r"k has shape \(1, 9, 2\); allowed"),
        (
            lambda q, k, v: daft_full(q, k, v, torch.zeros(9, 9), return_state=True),
            "return_state .* allowed: only with",
        ),
        (lambda q, k, v: daft_conv(q, k, v, torch.zeros(4, 4)), r"window \(4,\); allowed when not causal: odd"),
        (
            lambda q, k, v: daft_conv(q, k[..., :3], v, torch.zeros(3, 5)),
            "3 heads; allowed: a divisor of the channels, 4",
        ),
        (lambda q, k, v: daft_conv(q, k, v, torch.zeros(4, 3, 3)), "spatial_shape is None"),
        (
            lambda q, k, v: daft_conv(q, k, v, torch.zeros(4, 3, 3), spatial_shape=(2, 4)),
            r"\(2, 4\); allowed: .* 9 tokens",
        ),
        (lambda q, k, v: daft_conv(q, k, v, torch.zeros(4, 3), key_padding_mask=torch.zeros(1, 9)), "key_padding_mask"),
    ],
)
def test_bad_input_is_named(call: Callable, message: str) -> None:
    """Which argument, what was given, what is allowed."""
    with pytest.raises(ValueError, match=message):
        call(*(torch.randn(1, 9, 4) for _ in range(3)))
