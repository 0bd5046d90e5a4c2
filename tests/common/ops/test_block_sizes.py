"""How many rows, tokens or pieces an implementation takes at once is speed and memory, never the result."""

import pytest

from common.ops import daft_conv, daft_full, gau_attention
from common.ops.daft import conv_causal, full_sequence
from common.ops.quadratic import interface
from tests.common.inputs import qkv
from tests.common.ops.daft.formulas import daft_inputs, normal
from tests.compare import assert_close, gradients


def assert_independent(function, inputs, change, sizes) -> None:
    """``function`` gives the same outputs and gradients for each of ``sizes``, which ``change`` sets."""
    expected = function(*inputs)
    wanted = gradients(expected, inputs)
    for size in sizes:
        change(size)
        out = function(*inputs)
        assert_close(f"out of {size}", out, expected)
        for i, (gradient, one) in enumerate(zip(gradients(out, inputs), wanted)):
            assert_close(f"gradient {i} of {size}", gradient, one)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_of_gau_attention(causal, monkeypatch):
    def function(q, k, v):
        return gau_attention(q, k, v, causal=causal, kernel="relu2")

    def change(size):
        monkeypatch.setattr(interface, "BLOCK_ROWS", size)

    assert_independent(function, qkv(75), change, (1, 8, 74, 75))


def test_blocks_of_daft_conv(monkeypatch):
    """64 channels per head and a window of 40, which is beyond what is convolved directly."""

    def function(q, k, v, r):
        return daft_conv(q, k, v, r, causal=True)

    def change(size):
        monkeypatch.setattr(conv_causal, "CHUNK_SIZE", size)

    assert_independent(function, [*daft_inputs(70, 2, channels=128), normal(2, 40, seed=3)], change, (1, 5, 8, 100))


def test_blocks_of_daft_full(monkeypatch):
    w = normal(50, 50, seed=3)

    def function(q, k, v, w):
        return daft_full(q, k, v, w, causal=True)

    def change(size):
        monkeypatch.setattr(full_sequence, "CHUNK_SIZE", size)

    assert_independent(function, [*daft_inputs(50, 4), w], change, (1, 2, 16, 64))
