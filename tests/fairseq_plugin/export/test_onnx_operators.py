"""Operators that ONNX has not: what torch's own give."""

import pytest
import torch

from fairseq_plugin.export.onnx_operators import cummax, in_double, solve_triangular
from tests.compare import assert_close


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dim", [1, -1])
def test_running_maxima(length: int, dim: int) -> None:
    for x in (torch.randn(2, length, length), torch.randint(0, 3, (2, length, length)).float()):
        values, places = cummax(x, dim)
        expected = x.cummax(dim)
        assert torch.equal(values, expected.values) and torch.equal(places, expected.indices)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40, 64])
def test_triangular_systems(rows: int) -> None:
    """Only what is below the diagonal is read, as by torch; large entries too, where a power series would cancel."""
    a, b = (torch.randn(2, rows, columns, dtype=torch.float64) for columns in (rows, 3))
    expected = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    scale = expected.abs().max()
    found = solve_triangular(a, b, upper=False, unitriangular=True)
    assert_close("solution", found / scale, expected / scale)


def test_exponentials_by_way_of_double() -> None:
    """What is rounded once is within half a unit of the last place; other precisions stay what they are."""
    x = torch.linspace(-20, 20, 1001)
    found = in_double(torch.exp)(x)
    assert found.dtype == torch.float32 and torch.equal(found, x.double().exp().float())
    assert in_double(torch.exp)(x.double()) is NotImplemented
