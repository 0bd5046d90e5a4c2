"""Rotary positions around every inner attention; ``tests/common/contract`` has all promises of two of them."""

import pytest
import torch

from common.attention import ATTENTIONS, INPUTS, RotaryAttention, build_attention
from common.modules.rotary import rotate, token_positions
from tests.common.contract.mechanisms import CHANNELS, Case, run_in_parts, tensors
from tests.common.inputs import SIDES, padding
from tests.common.refusals import refused
from tests.compare import assert_close


def has_dot_products(case: Case) -> bool:
    """Whether its queries and keys are as wide as each other, so that they can be rotated, and it does not do so."""
    if "rotary" in case.kind.supports or set(INPUTS) & set(case.kind.needs):
        return False
    widths = case.build().projections(CHANNELS)
    return widths.get("q") == widths.get("k") == CHANNELS


built = [
    Case(name, causal)
    for name, kind in ATTENTIONS.items()
    for causal, word in ((False, "bidirectional"), (True, "causal"))
    if word in kind.supports
]


@pytest.mark.parametrize("case", [case for case in built if has_dot_products(case)], ids=str)
def test_it_is_the_inner_attention_of_rotated_queries_and_keys(case):
    module = case._replace(rotary=True).build()
    assert type(module.inner) is case.kind and module.causal == case.causal
    inputs, positions = tensors(module, 9, grad=False), torch.arange(9)
    turned = {**inputs, **{name: rotate(inputs[name], positions) for name in "qk"}}
    out = module(**inputs)
    assert torch.equal(out, module.inner(**turned))
    assert not torch.allclose(out, module.inner(**inputs))
    if case.causal:
        parts, states = run_in_parts(module, inputs, (5, 1, 3))
        assert_close("in parts", parts, out)
        assert states[-1]["rotary_count"].tolist() == [9, 9]


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
    """Cross-attention: each side counts its own real tokens."""
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
