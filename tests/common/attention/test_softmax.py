"""The softmax module against softmax attention written out."""

import math

import pytest
import torch

from common.attention import build_attention
from tests.common.inputs import SIDES, padding, qkv
from tests.compare import assert_close, gradients


def literal(q, k, v, causal, key_padding_mask, query_padding_mask):
    """softmax(q kᵀ / sqrt(d)) v one query at a time over the keys it may see; 0 without any, or as padding."""
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            keys = [j for j in range(k.shape[2]) if not (causal and j > i)]
            keys = [j for j in keys if key_padding_mask is None or not key_padding_mask[b, j]]
            if not keys or (query_padding_mask is not None and query_padding_mask[b, i]):
                rows.append(0 * v[b, :, 0])
                continue
            scores = (k[b, :, keys] * q[b, :, i : i + 1]).sum(-1) / math.sqrt(q.shape[3])  # (H, keys)
            rows.append((scores.softmax(-1)[..., None] * v[b, :, keys]).sum(1))
    return torch.stack(rows, 1).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


@pytest.mark.parametrize("queries", SIDES)
@pytest.mark.parametrize("keys", SIDES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_it_is_softmax_attention(causal, keys, queries):
    inputs = qkv(11, 11 if causal else 8, batch=3)
    masks = (padding(keys, 3, inputs[1].shape[2]), padding(queries, 3, 11))
    out = build_attention("softmax", causal=causal)(*inputs, *masks)
    expected = literal(*inputs, causal, *masks)
    assert_close("out", out, expected)
    for name, actual, wanted in zip("qkv", gradients(out, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", actual, wanted)


def test_dropout_drops_entries_of_the_map():
    q, k, _ = qkv(30, e=1)
    identity = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    attention = build_attention("softmax")
    share = attention(q, k, identity, dropout_p=0.5) / attention(q, k, identity)
    kept = share > 1.0
    assert_close("kept", share[kept], torch.full_like(share[kept], 2.0))
    assert (share[~kept] == 0).all() and 0.4 < kept.double().mean() < 0.6
    assert torch.equal(attention(q, k, identity), attention(q, k, identity, dropout_p=0.0))
