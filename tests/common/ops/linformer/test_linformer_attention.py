"""Linformer beyond the contract: its relation to softmax, its longest length, and the package linformer."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import linformer_attention
from tests.common.inputs import padding, qkv
from tests.compare import assert_close, weights


def test_with_a_sum_for_each_key_it_is_softmax_attention():
    q, k, v = qkv(5, 7)
    identity = torch.eye(7, dtype=q.dtype)
    assert_close("out", linformer_attention(q, k, v, identity, identity), F.scaled_dot_product_attention(q, k, v))


def test_a_shared_matrix_is_one_parameter():
    module = build_attention("linformer", max_tokens=9, projected_length=3, shared=True).double()
    assert list(weights(module.state_dict())) == ["key_rows"]
    q, k, v = qkv(9)
    assert_close("out", module(q, k, v), linformer_attention(q, k, v, module.key_rows, module.key_rows))


def test_it_is_the_package_linformer_on_whole_sequences():
    """The package has no masks: it sums padding like any other token."""
    package = pytest.importorskip("linformer")
    module = package.LinformerSelfAttention(8, seq_len=12, k=3, heads=2).double()
    module.to_out = torch.nn.Identity()
    x = torch.randn(2, 10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    projected = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (module.to_q, module.to_k, module.to_v))
    q, k, v = (y.detach() for y in projected)
    rows = module.proj_k.detach(), module.proj_v.detach()
    assert_close("out", linformer_attention(q, k, v, *rows).transpose(1, 2).flatten(2), module(x))
    mask = padding("left", 2, 10)
    out = linformer_attention(q, k, v, *rows, key_padding_mask=mask, query_padding_mask=mask)
    real = ~mask[1]
    alone = module(x[1:, real])
    assert_close("without its padding", out[1, :, real].transpose(0, 1).flatten(1), alone[0])
