"""cosFormer beyond the contract: its weights, its largest position, its options."""

import math

import pytest
import torch

from common.attention import build_attention
from common.ops import cosformer_attention
from tests.common.inputs import qkv
from tests.compare import assert_close


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_weights_fall_off_as_a_cosine_of_the_distance(causal):
    """If queries and keys are ones, only the cosine remains."""
    ones = torch.ones(1, 1, 7, 3, dtype=torch.float64)
    out = cosformer_attention(ones, ones, torch.eye(7, dtype=torch.float64)[None, None], max_tokens=9, causal=causal)
    positions = torch.arange(7, dtype=torch.float64)
    weights = torch.cos(math.pi / 2 * (positions[:, None] - positions) / 9)
    weights = weights.tril() if causal else weights
    assert_close("weights", out[0, 0], weights / weights.sum(-1, keepdim=True))


def test_m_is_no_length_of_the_batch():
    """A longer M is another function; a module's state dict records M."""
    q, k, v = qkv(6)
    out, other = (cosformer_attention(q, k, v, max_tokens=m) for m in (6, 60))
    assert (out - other).abs().max() > 1e-3
    state = build_attention("cosformer", max_tokens=6).state_dict()
    with pytest.warns(UserWarning, match="max_tokens=6.*max_tokens=60"):
        build_attention("cosformer", max_tokens=60).load_state_dict(state)
