"""Sparse Sinkhorn attention beyond the contract: sorting of chunks, sums of weights, and memory."""

import pytest
import torch
from torch.nn import functional as F

from common.ops import sinkhorn_attention
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients


def test_a_sure_sorting_puts_another_chunk_beside_the_own():
    """Three chunks of four tokens, whose sums select a chunk: each selects the next, and the last selects the first."""
    q, k, v = (x.detach() for x in qkv(12, batch=1, heads=1, d=3))
    k = k - k.unflatten(2, (3, 4)).mean(3).repeat_interleave(4, 2) + torch.eye(3).repeat_interleave(4, 0)
    wanted = torch.eye(3, dtype=torch.float64).roll(1, 1)[None] * 1e3  # chunk g, whose sum is 4 in channel g
    out = sinkhorn_attention(q, k, v, wanted, max_tokens=12, chunk_size=4)
    for g in range(3):
        own, other = slice(4 * g, 4 * g + 4), slice(4 * ((g + 1) % 3), 4 * ((g + 1) % 3) + 4)
        both = (torch.cat([x[:, :, own], x[:, :, other]], dim=2) for x in (k, v))
        assert_close(f"chunk {g}", out[:, :, own], F.scaled_dot_product_attention(q[:, :, own], *both))


@pytest.mark.parametrize("sort, columns", [("sinkhorn", True), ("softmax", False)])
def test_weights_of_chunks_add_up(sort, columns):
    """Zero queries weight all keys equally, and values that identify their chunk show the weights of chunks."""
    _, k, _ = qkv(20, batch=1, heads=1, scale=0.3)
    names = torch.eye(4, dtype=torch.float64).repeat_interleave(5, 0)[None, None]
    options = {"max_tokens": 20, "chunk_size": 5, "sort": sort, "iterations": 60, "normaliser": "separate"}
    weight = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = sinkhorn_attention(torch.zeros_like(k), k, names, weight, **options)
    weights = (out - names)[0, 0, ::5]  # without the average over the own chunk
    ones = torch.ones(4, dtype=torch.float64)
    assert_close("rows", weights.sum(1), ones, 1e-6)
    assert ((weights.sum(0) - 1).abs().max() < 1e-6) == columns


def test_a_single_chunk_is_softmax_attention():
    """The chunk is sorted to itself: under a joint softmax each key counts twice, which normalisation cancels."""
    q, k, v = qkv(7)
    weight = torch.randn(2, 5, 3, dtype=torch.float64)
    out = sinkhorn_attention(q, k, v, weight, max_tokens=24, chunk_size=8)
    assert_close("joint", out, F.scaled_dot_product_attention(q, k, v))
    out = sinkhorn_attention(q, k, v, weight, max_tokens=24, chunk_size=8, normaliser="separate")
    assert_close("separate", out, 2 * F.scaled_dot_product_attention(q, k, v))


def test_large_sums_of_keys_stay_finite():
    q, k, v = (x.detach().requires_grad_() for x in qkv(30, dtype=torch.float32, scale=100.0))
    weight = torch.randn(2, 5, 4, requires_grad=True)
    out = sinkhorn_attention(q, k, v, weight, max_tokens=32, chunk_size=8)
    assert torch.isfinite(out).all() and all(torch.isfinite(x).all() for x in gradients(out, (q, k, v, weight)))
