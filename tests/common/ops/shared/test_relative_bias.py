"""Biases over distances against the matrices that they represent."""

import pytest
import torch

from common.ops.shared.relative_bias import bias_at, bias_rows, check_bias, resize_toeplitz
from tests.common.inputs import BIASES, bias_like
from tests.common.refusals import refused
from tests.compare import assert_close, gradients

forms = pytest.mark.parametrize("form", [form for form in BIASES if form != "no bias"])
LIKE = torch.randn(2, 3, 5, 4)


def written_out(bias, tokens: int):
    """The matrix (..., n, n) whose entry (i, j) is the vector's i - j + n - 1; a matrix is returned unchanged."""
    if bias.shape[-1] == tokens and tokens > 1:
        return bias
    rows = [torch.stack([bias[..., i - j + tokens - 1] for j in range(tokens)], -1) for i in range(tokens)]
    return torch.stack(rows, -2)


@forms
@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_rows_are_those_of_the_matrix(tokens, form):
    bias = bias_like(form, tokens, 3)
    matrix = written_out(bias, tokens)
    for start in range(tokens):
        for stop in range(start + 1, tokens + 1):
            for keys in range(1, tokens + 1):
                rows = bias_rows(bias, tokens, start, stop, keys)
                assert torch.equal(rows, matrix[..., start:stop, :keys])


@forms
def test_one_graph_gives_the_rows_of_any_number_of_tokens(form):
    torch._dynamo.reset()

    def function(bias, queries):
        return bias_rows(bias, queries.shape[0], 1, queries.shape[0] - 1, queries.shape[0])

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    compiled(bias_like(form, 9, 3), torch.zeros(9, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (6, 7, 13):
            bias, queries = bias_like(form, tokens, 3), torch.zeros(tokens, 4)
            out, expected = compiled(bias, queries), function(bias, queries)
            assert torch.equal(out, expected)
            assert_close("gradient", *(gradients(x, [bias])[0] for x in (out, expected)))


@forms
def test_positions_may_differ_by_row_of_the_batch(form):
    bias = bias_like(form, 8, 3)
    matrix = written_out(bias, 8)
    positions = torch.tensor([[0, 3, 7], [7, 5, 5]])
    rows = bias_at(bias, 8, positions)
    assert rows.shape == (2, 3 if form in ("vectors", "matrices") else 1, 3, 8)
    for b in range(2):
        expected = matrix[..., positions[b], :]
        assert torch.equal(rows[b], expected if expected.dim() == 3 else expected[None])


def test_a_single_token_has_a_single_entry():
    for shape in ((1,), (1, 1), (3, 1), (3, 1, 1)):
        bias = torch.randn(shape)
        check_bias(bias, 1, 3, LIKE, "chunk_size")
        assert torch.equal(bias_rows(bias, 1, 0, 1, 1).flatten(), bias.flatten())
        assert torch.equal(bias_at(bias, 1, torch.zeros(2, 1, dtype=torch.long))[1].flatten(), bias.flatten())


@pytest.mark.parametrize("heads", [None, 3])
def test_resized_biases_keep_what_belongs_to_a_distance(heads):
    bias = torch.randn(*([] if heads is None else [heads]), 9)  # distances -4 to 4
    assert torch.equal(resize_toeplitz(bias, 5), bias)
    assert torch.equal(resize_toeplitz(bias, 3), bias[..., 2:7])
    longer = resize_toeplitz(bias, 7)
    assert longer.shape[-1] == 13 and torch.equal(longer[..., 2:11], bias)
    assert (longer[..., :2] == 0).all() and (longer[..., 11:] == 0).all()


@pytest.mark.parametrize(
    "shape", [(8,), (10,), (4, 5), (6, 6), (1, 9), (2, 9), (3, 10), (1, 5, 5), (3, 5, 4), (2, 3, 5, 5), ()], ids=str
)
def test_biases_of_another_shape_are_refused(shape):
    with refused("bias", f"has shape {shape}", "for chunk_size = 5 and 3 heads: (9,), (5, 5), (3, 9), (3, 5, 5)"):
        check_bias(torch.zeros(shape), 5, 3, LIKE, "chunk_size")


@pytest.mark.parametrize(
    "bias, given, allowed",
    [
        (torch.zeros(9, dtype=torch.long), "torch.int64", "floating point"),
        ([0.0] * 9, "list", "floating point"),
        (torch.zeros(9, device="meta"), "meta", "cpu"),
    ],
)
def test_biases_that_are_no_floating_point_tensor_here_are_refused(bias, given, allowed):
    with refused("bias", given, allowed):
        check_bias(bias, 5, 3, LIKE, "chunk_size")
