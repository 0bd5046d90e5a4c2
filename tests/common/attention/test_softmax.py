"""The softmax module against an explicit formula."""

import torch

from common.attention import build_attention
from tests.common.inputs import qkv
from tests.compare import assert_close


def test_dropout_drops_entries_of_the_map():
    q, k, _ = qkv(30, e=1)
    identity = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    attention = build_attention("softmax")
    share = attention(q, k, identity, dropout_p=0.5) / attention(q, k, identity)
    is_kept = share > 1.0
    assert_close("kept", share[is_kept], torch.full_like(share[is_kept], 2.0))
    assert (share[~is_kept] == 0).all() and 0.4 < is_kept.double().mean() < 0.6
    assert torch.equal(attention(q, k, identity), attention(q, k, identity, dropout_p=0.0))
