"""Sparse Transformer: which tokens see each other, the strided pattern's promises, and cost."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from common.ops import sparse_attention
from common.ops.sparse import PATTERNS
from tests.common.inputs import qkv
from tests.common.properties import Elements, largest_tensor
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
patterns = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.mark.parametrize(
    "options, seen",
    [
        ({"pattern": "fixed", "stride": 5, "columns": 2}, [3, 4, 8, 9, 10, 11, 12, 13, 14, 18, 19]),
        ({"pattern": "fixed", "stride": 5, "columns": 2, "causal": True}, [3, 4, 8, 9, 10, 11, 12]),
        ({"pattern": "strided", "stride": 3}, [0, 3, 6, 9, 10, 11, 12, 13, 14, 15, 18, 21]),
        ({"pattern": "strided", "stride": 3, "causal": True}, [0, 3, 6, 9, 10, 11, 12]),
    ],
)
def test_token_12_of_23_sees(options, seen):
    """The last chunk of five has only three tokens, so it has no columns yet."""
    q, k, v = qkv(23)
    reached = gradients(sparse_attention(q, k, v, **options)[:, :, 12], [v])[0].abs().sum((0, 1, 3)).nonzero()
    assert reached.flatten().tolist() == seen


@patterns
@causality
def test_a_stride_of_all_tokens_is_softmax_attention(causal, pattern):
    q, k, v = qkv(23)
    out = sparse_attention(q, k, v, pattern=pattern, stride=23, causal=causal)
    assert_close("out", out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))


def test_more_columns_than_a_chunk_has_are_all_tokens():
    q, k, v = qkv(23)
    out = sparse_attention(q, k, v, stride=4, columns=9)
    assert_close("out", out, F.scaled_dot_product_attention(q, k, v))


@patterns
@causality
@torch.no_grad()
def test_cost_is_that_of_the_root_of_the_length(causal, pattern):
    """Four times the tokens with twice the stride need eight times the work, and no map of all pairs is created."""
    totals = []
    for n, stride in ((1024, 32), (4096, 64)):
        inputs = [x.detach() for x in qkv(n, batch=1, dtype=torch.float32)]
        call = partial(sparse_attention, *inputs, pattern=pattern, stride=stride, columns=2, causal=causal)
        with Elements() as counted:
            call()
        totals.append(counted.total)
        assert largest_tensor(call) <= inputs[0].shape[1] * n * 5 * stride
    assert totals[1] < 8.2 * totals[0]


@patterns
@torch.no_grad()
def test_a_long_prompt_behind_a_state_makes_no_map_of_all_pairs(pattern):
    options = {"pattern": pattern, "stride": 16, "causal": True, "return_state": True}
    q, k, v = (x.detach() for x in qkv(600, batch=1))
    _, state = sparse_attention(q[:, :, :10], k[:, :, :10], v[:, :, :10], **options)
    later = [x[:, :, 10:] for x in (q, k, v)]
    assert largest_tensor(lambda: sparse_attention(*later, initial_state=state, **options)) < 600 * 600 / 2
