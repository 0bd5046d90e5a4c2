"""Kernels of mixed chunk attention against the literal reference in float64, forward and in gradients.

In the interpreter, tiles have 16 tokens: chunks of 20 need two, the second only partly full.
"""

import math

import pytest
import torch

from common.ops import mixed_chunk_attention
from common.ops.mixed_chunk.gpu import kernels, sequence
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from tests.common.inputs import bias_like, doubled, mixed_chunk_inputs, padding
from tests.common.ops.shared.gpu.device import on_cpu, on_device
from tests.compare import assert_close, gradients

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")
SMALL = {"batch": 1, "heads": 1, "dtype": torch.float32}

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def of_all(out, leaves):
    """Gradients of every leaf, zero for a leaf that ``out`` does not depend on."""
    return gradients(out + 0 * sum(leaf.cpu().sum() for leaf in leaves), leaves)


def assert_agrees(inputs, bias=None, mask=None, **options) -> None:
    leaves = inputs if bias is None else (*inputs, bias)
    exact, leaves = doubled(*leaves), on_device(leaves)
    (mask_there,) = on_device([mask])
    there = {"bias": None if bias is None else leaves[5], "key_padding_mask": mask_there}
    out = mixed_chunk_attention(*leaves[:5], **there, **options)
    arguments = {"bias": None if bias is None else exact[5], "key_padding_mask": mask}
    expected = mixed_chunk_attention_reference(*exact[:5], **arguments, **options)
    assert out.dtype == inputs[4].dtype
    assert_close("out", out.cpu(), expected.to(out.dtype))
    for name, actual, wanted in zip(NAMES, on_cpu(of_all(out.cpu(), leaves)), of_all(expected, exact)):
        assert_close(f"gradient of {name}", actual, wanted.to(actual.dtype))


@causality
@pytest.mark.parametrize("kernel, form", [("relu2", "vector"), ("laplace", "matrix")])
def test_kernels_and_biases_agree(kernel, form, causal):
    inputs, bias = mixed_chunk_inputs(37, **SMALL), bias_like(form, 20, dtype=torch.float32)
    assert_agrees(inputs, bias, chunk_size=20, kernel=kernel, causal=causal)


@causality
@pytest.mark.parametrize("form", ["no bias", "vectors"])
def test_biases_of_heads_agree(form, causal):
    inputs, bias = mixed_chunk_inputs(7, **{**SMALL, "heads": 2}), bias_like(form, 5, dtype=torch.float32)
    assert_agrees(inputs, bias, chunk_size=5, causal=causal)


def test_a_matrix_of_one_number_serves_all_heads():
    """With chunks of one token, the bias is a matrix and a vector at once."""
    bias = bias_like("matrix", 1, dtype=torch.float32)
    assert_agrees(mixed_chunk_inputs(3, **{**SMALL, "heads": 2}), bias, chunk_size=1)


@pytest.mark.parametrize("length, chunk_size", [(1, 4), (2, 1), (16, 16), (17, 16), (17, 40)])
def test_any_length_and_chunk_size_agrees(length, chunk_size):
    inputs, bias = mixed_chunk_inputs(length, **SMALL), bias_like("vector", chunk_size, dtype=torch.float32)
    assert_agrees(inputs, bias, chunk_size=chunk_size, causal=length != 2)


@causality
@pytest.mark.parametrize("side", ["both", "all"])
def test_padding_on_any_side_agrees(side, causal):
    inputs, bias = mixed_chunk_inputs(9, **{**SMALL, "batch": 3}), bias_like("vector", 4, dtype=torch.float32)
    assert_agrees(inputs, bias, padding(side, 3, 9), chunk_size=4, causal=causal)


@causality
@pytest.mark.parametrize("walks", [False, True], ids=["program per chunk", "program per head"])
def test_sums_over_chunks_agree_however_programs_share_them(walks, causal, monkeypatch):
    """One head of two sequences is enough work for a GPU of two multiprocessors, but not of three."""
    monkeypatch.setattr(sequence, "processors", lambda device: 2 if walks else 3)
    inputs, bias = mixed_chunk_inputs(13, **{**SMALL, "batch": 2}), bias_like("vector", 5, dtype=torch.float32)
    assert_agrees(inputs, bias, padding("left", 2, 13), chunk_size=5, causal=causal)


@causality
def test_a_bias_by_distance_has_its_gradient_without_gather_too(causal, monkeypatch):
    """Triton 3.2 has no gather."""
    monkeypatch.setattr(kernels, "HAS_GATHER", False)
    inputs, bias = mixed_chunk_inputs(25, **SMALL), bias_like("vector", 20, dtype=torch.float32)
    assert_agrees(inputs, bias, chunk_size=20, causal=causal)


@causality
@pytest.mark.parametrize("term", ["local", "linear"])
def test_one_term_alone_agrees(term, causal):
    assert_agrees(mixed_chunk_inputs(21, **SMALL), chunk_size=8, causal=causal, **{term: False})


@pytest.mark.parametrize("s, e", [(1, 1), (17, 5), (5, 70)])
def test_any_number_of_channels_agrees(s, e):
    """Several blocks of values at e = 70, forward of 32 and backward of 64."""
    assert_agrees(mixed_chunk_inputs(11, **SMALL, s=s, e=e), chunk_size=8, causal=True)


@pytest.mark.parametrize("dtype, causal", [(torch.bfloat16, True), (torch.float16, False)], ids=str)
def test_half_precision_agrees_with_the_float64_reference(dtype, causal):
    inputs = mixed_chunk_inputs(13, **{**SMALL, "batch": 2, "dtype": dtype})
    assert_agrees(inputs, bias_like("vector", 8, dtype=dtype), padding("left", 2, 13), chunk_size=8, causal=causal)


def test_without_heads_and_in_any_layout():
    inputs = on_device(mixed_chunk_inputs(12, **{**SMALL, "heads": None}))
    options = {"chunk_size": 5, "causal": True}
    fused = torch.cat([inputs[0], inputs[4]], dim=2)  # q_quad and v are then slices of rows
    out = mixed_chunk_attention(fused[:, :, :4], *inputs[1:4], fused[:, :, 4:], **options)
    expected = mixed_chunk_attention(*(x[:, None] for x in inputs), **options)[:, 0]
    assert torch.equal(out, expected)
    for actual, wanted in zip(gradients(out.cpu(), inputs), gradients(expected.cpu(), inputs)):
        assert torch.equal(actual, wanted)


@causality
def test_what_stands_in_padding_never_leaks(causal):
    mask = padding("both", 2, 12)
    clean = on_device(mixed_chunk_inputs(12, **{**SMALL, "batch": 2}))
    poisoned = on_device(x.masked_fill(mask.to(x.device)[:, None, :, None], math.nan) for x in clean)
    (bias, mask_there) = on_device([bias_like("vector", 5, dtype=torch.float32), mask])
    options = {"chunk_size": 5, "causal": causal, "bias": bias, "key_padding_mask": mask_there}
    out, expected = mixed_chunk_attention(*poisoned, **options), mixed_chunk_attention(*clean, **options)
    assert torch.equal(out, expected)
    actual_gradients, expected_gradients = (
        gradients(out.cpu(), (*poisoned, bias)),
        gradients(expected.cpu(), (*clean, bias)),
    )
    for name, actual, other in zip(NAMES, actual_gradients, expected_gradients):
        assert torch.equal(actual, other), f"gradient of {name}"


def test_nan_in_a_real_token_is_not_hidden():
    for kernel in ("relu2", "laplace"):
        inputs = [x.detach().clone() for x in on_device(mixed_chunk_inputs(9, **SMALL))]
        inputs[1][0, 0, 2, 1] = math.nan  # of k_quad
        out = mixed_chunk_attention(*inputs, chunk_size=5, kernel=kernel)
        assert torch.isnan(out[:, :, :5]).all() and torch.isfinite(out[:, :, 5:]).all(), kernel


@pytest.mark.parametrize("which", [1, 4, 5], ids=lambda i: NAMES[i])
def test_a_gradient_of_one_input_alone(which):
    leaves = on_device((*mixed_chunk_inputs(9, **SMALL), bias_like("vector", 5, dtype=torch.float32)))
    results = []
    for inputs in (leaves, [x if i == which else x.detach() for i, x in enumerate(leaves)]):
        out = mixed_chunk_attention(*inputs[:5], bias=inputs[5], chunk_size=5, causal=True)
        results.append(gradients(out.cpu(), [inputs[which]])[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{"kernel": "softmax"}, {"first_softmax": True}, {"first_to_all": True}])
def test_what_kernels_do_not_take_is_left_to_the_pytorch_form(options, with_pytorch):
    inputs = mixed_chunk_inputs(9, **SMALL)
    out = mixed_chunk_attention(*on_device(inputs), chunk_size=5, **options)
    expected = mixed_chunk_attention_reference(*inputs, chunk_size=5, **options)
    assert_close("out", out.cpu(), expected)


def test_gradients_of_second_order_are_those_of_the_pytorch_form(with_pytorch):
    mask = padding("left", 1, 9)

    def second_order(leaves):
        there = {"bias": leaves[5], "key_padding_mask": mask.to(leaves[0].device)}
        out = mixed_chunk_attention(*leaves[:5], **there, chunk_size=5, causal=True)
        first = torch.autograd.grad(out.cpu().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.cpu().sin().sum() for x in first), leaves)

    leaves = (*mixed_chunk_inputs(9, **SMALL), bias_like("vector", 5, dtype=torch.float32))
    for name, actual, wanted in zip(NAMES, second_order(on_device(leaves)), second_order(doubled(*leaves))):
        assert_close(f"gradient of {name}", actual.cpu(), wanted.float(), 1e-4)  # plain PyTorch in float32 on a GPU


def test_a_backward_kernel_that_fails_gives_way_to_the_pytorch_form(with_pytorch, monkeypatch):
    inputs = on_device(mixed_chunk_inputs(9, **SMALL))
    wanted = gradients(mixed_chunk_attention(*inputs, chunk_size=5).cpu(), inputs)

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no configuration fits this device")

    monkeypatch.setattr(kernels, "gradients", Broken())
    out = mixed_chunk_attention(*inputs, chunk_size=5)
    with pytest.warns(UserWarning, match="mixed_chunk_attention .*no configuration fits.*LINEARTIME_TRITON=0"):
        actual_gradients = gradients(out.cpu(), inputs)
    for name, actual, other in zip(NAMES, actual_gradients, wanted):
        assert_close(f"gradient of {name}", actual, other)
