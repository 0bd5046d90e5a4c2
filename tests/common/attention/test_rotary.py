"""Rotary positions around attention: checks in addition to the contract."""

import pytest
import torch

from common.attention import RotaryAttention, build_attention
from common.modules.rotary import token_positions
from tests.common.contract.mechanisms import Case, tensors
from tests.common.inputs import SIDES, padding
from tests.common.refusals import refused
from tests.compare import assert_close


@pytest.mark.parametrize("side", SIDES)
def test_positions_count_real_tokens(side):
    x, mask, count = torch.randn(3, 2, 13, 4), padding(side, 3, 13), torch.tensor([0, 5, 7])
    assert token_positions(x, None).tolist() == list(range(13))
    for before in (None, count):
        positions = token_positions(x, mask, before)
        if positions.dim() == 1:
            assert mask is None and before is None
            continue
        for b in range(3):
            start = 0 if before is None else before[b].item()
            row = [False] * 13 if mask is None else mask[b].tolist()
            expected = [start + sum(not hidden for hidden in row[:i]) for i in range(13)]
            assert positions.expand(3, 1, 13)[b, 0].tolist() == expected


def test_queries_and_keys_have_their_own_masks():
    """In cross-attention, each side counts its own real tokens."""
    module = Case("softmax", False, rotary=True).build()
    inputs = tensors(module, 7, 11, grad=False)
    queries, keys = padding("left", 2, 7), padding("left", 2, 11)
    out = module(**inputs, key_padding_mask=keys, query_padding_mask=queries)
    for b in range(2):
        q, k, v = (inputs[name][b : b + 1, :, ~(queries if name == "q" else keys)[b]] for name in "qkv")
        assert_close(f"row {b}", out[b : b + 1, :, ~queries[b]], module(q, k, v))


def test_odd_heads_are_refused_when_the_module_is_built():
    with refused("head_dim", "5", "even"):
        RotaryAttention(build_attention("flow"), 5)


def test_images_alone_have_no_order_to_rotate_by():
    with pytest.raises(ValueError, match="inner.*'soft'.*sequences"):
        RotaryAttention(build_attention("soft", num_heads=2, head_dim=8, spatial_dims=2), 8)
