"""Local attention: its limits, its cost, and comparison with the package local-attention."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from common.ops import local_attention
from tests.common.inputs import qkv
from tests.common.properties import Elements, largest_tensor
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@causality
@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunked"])
def test_a_window_of_all_tokens_is_softmax_attention(chunked, causal):
    q, k, v = qkv(70)
    out = local_attention(q, k, v, window=150, chunked=chunked, causal=causal)
    assert_close("out", out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))


@causality
def test_chunks_are_sequences_of_their_own(causal):
    q, k, v = qkv(70)
    out = local_attention(q, k, v, window=32, chunked=True, causal=causal)
    parts = [F.scaled_dot_product_attention(*x, is_causal=causal) for x in zip(*(x.split(32, 2) for x in (q, k, v)))]
    assert_close("out", out, torch.cat(parts, dim=2))


@pytest.mark.parametrize(
    "options, seen",
    [
        ({"window": 4, "causal": True}, range(17, 21)),
        ({"window": 5}, range(18, 23)),
        ({"window": 4}, range(18, 22)),
        ({"window": 6, "chunked": True}, range(18, 24)),
        ({"window": 6, "chunked": True, "causal": True}, range(18, 21)),
    ],
)
def test_token_20_sees(options, seen):
    """The window is w tokens including the query; an even window that is not causal extends one further back."""
    q, k, v = qkv(70)
    reached = gradients(local_attention(q, k, v, **options)[:, :, 20], [v])[0].abs().sum((0, 1, 3)).nonzero()
    assert reached.flatten().tolist() == list(seen)


@causality
@torch.no_grad()
def test_work_and_memory_grow_with_the_window_and_not_with_more(causal):
    """Beyond the smallest block size; the largest tensor holds the scores, half as many again as needed."""
    q, k, v = (x.detach() for x in qkv(2048, batch=1))
    results = []
    for window in (128, 256):
        call = partial(local_attention, q, k, v, window=window, causal=causal)
        with Elements() as counted:
            call()
        results.append(counted.total)
        assert largest_tensor(call) < 1.6 * q.shape[1] * 2048 * window
    assert 1.5 < results[1] / results[0] < 2.1


@pytest.fixture
def peer():
    """The layer of the package local-attention, from the extra ``bench``."""
    return pytest.importorskip("local_attention").LocalAttention


@causality
def test_the_windows_are_those_of_the_package_local_attention(peer, causal):
    """A window of 8 in the package corresponds to 9 in ours if causal, and to 17 if not."""
    layer = peer(8, causal=causal, exact_windowsize=True)
    q, k, v = qkv(40, d=4, e=4)
    mask = torch.arange(40) >= torch.tensor([[40], [29]])
    out = local_attention(q, k, v, window=9 if causal else 17, causal=causal, key_padding_mask=mask)
    assert_close("out", out, layer(q, k, v, mask=~mask).masked_fill(mask[:, None, :, None], 0.0))


@causality
def test_in_the_package_local_attention_padding_on_the_left_moves_the_buckets(peer, causal):
    """By default its windows are buckets of the padded sequence; ours count real tokens."""
    layer = peer(8, causal=causal, autopad=True)
    q, k, v = (x.detach() for x in qkv(27, d=4, e=4))
    padded, mask = [F.pad(x, (0, 0, 5, 0)) for x in (q, k, v)], (torch.arange(32) < 5).expand(2, -1)
    padded_out, unpadded_out = (
        layer(*padded, mask=~mask)[:, :, 5:],
        layer(q, k, v, mask=torch.ones(2, 27, dtype=torch.bool)),
    )
    assert (padded_out - unpadded_out).abs().max() > 0.1
    out = local_attention(*padded, window=9, causal=causal, key_padding_mask=mask)[:, :, 5:]
    assert_close("out", out, local_attention(q, k, v, window=9, causal=causal))
