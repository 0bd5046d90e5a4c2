"""Overlapping chunks and attention to chunk summaries against their literal reference; their state."""

import pytest
import torch

from common.ops import gau_attention, mixed_chunk_attention
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import bias_like, mixed_chunk_inputs, padding
from tests.compare import assert_close, assert_gradients_close

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v")
FURTHER = {"overlap": ["overlap"], "summaries": ["chunk_summaries"], "both": ["overlap", "chunk_summaries"]}
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
terms = pytest.mark.parametrize("term", FURTHER)


def options_of(term, **options):
    return {**dict.fromkeys(FURTHER[term], True), **options}


def assert_agrees(inputs, bias, **options):
    """Compare outputs and gradients of the function and of the reference."""
    leaves = dict(zip(NAMES, inputs)) if bias is None else {**dict(zip(NAMES, inputs)), "bias": bias}
    out = mixed_chunk_attention(*inputs, bias=bias, **options)
    expected = mixed_chunk_attention_reference(*inputs, bias=bias, **options)
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, leaves)


@causality
@terms
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_with_padding(term, causal, side):
    options = options_of(term, causal=causal, key_padding_mask=padding(side, 3, 13), chunk_size=4)
    bias = bias_like("vectors", 8 if "overlap" in FURTHER[term] else 4, 1)
    assert_agrees(mixed_chunk_inputs(13, batch=3, heads=1), bias, **options)


@causality
@terms
@pytest.mark.parametrize("n, chunk_size", [(1, 1), (1, 4), (13, 1), (13, 5), (12, 4), (13, 20)])
def test_every_chunk_size(term, causal, n, chunk_size):
    assert_agrees(mixed_chunk_inputs(n, batch=1), None, chunk_size=chunk_size, **options_of(term, causal=causal))


@causality
@pytest.mark.parametrize("kernel", SCORE_KERNELS)
@pytest.mark.parametrize("others", [{}, {"linear": False}, {"local": False}])
def test_every_kernel_and_term(kernel, others, causal):
    term = "summaries" if others == {"local": False} else "both"
    options = options_of(term, causal=causal, kernel=kernel, chunk_size=3, **others)
    assert_agrees(mixed_chunk_inputs(8, batch=1, heads=None), None, **options)


def test_two_chunks_that_overlap_are_quadratic_attention():
    """With n = 2C, every token is seen: FLASH-Quad with the divisor 2C."""
    q, k, *_, v = inputs = mixed_chunk_inputs(8)
    bias = bias_like("vector", 8)
    out = mixed_chunk_attention(*inputs, bias=bias, chunk_size=4, causal=True, linear=False, overlap=True)
    expected = gau_attention(q, k, v, bias=bias, causal=True, divisor=8.0)
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, {"q": q, "k": k, "v": v, "bias": bias})


@terms
@pytest.mark.parametrize("pieces", [(13,), (1,) * 13, (4, 1, 6, 2)])
def test_in_pieces_it_is_the_whole(term, pieces):
    inputs, options = mixed_chunk_inputs(13, batch=3), options_of(term, causal=True, chunk_size=4)
    mask = padding("left", 3, 13)
    outputs, state, start = [], None, 0
    for n in pieces:
        part, part_options = slice(start, start + n), {**options, "key_padding_mask": mask[:, start : start + n]}
        out, state = mixed_chunk_attention(
            *(x[:, :, part] for x in inputs), initial_state=state, return_state=True, **part_options
        )
        outputs, start = [*outputs, out], start + n
    whole = mixed_chunk_attention(*inputs, key_padding_mask=mask, **options)
    assert_close("in pieces", torch.cat(outputs, dim=2), whole)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"overlap": True, "local": False}, "overlap=True is given; allowed: without local=False"),
        ({"overlap": True, "first_softmax": True}, "overlap=True is given; allowed: without first_softmax=True"),
        ({"overlap": True, "bias": torch.zeros(7)}, r"bias has shape \(7,\); allowed .* with overlap: \(15,\)"),
        ({"chunk_summaries": True, "return_state": True}, "return_state"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mixed_chunk_attention(*mixed_chunk_inputs(5, dtype=torch.float32), chunk_size=4, **options)
