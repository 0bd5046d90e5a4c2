"""Rotary positions around every inner attention."""

import copy

import pytest
import torch

from common.attention import ATTENTIONS, RotaryAttention, build_attention
from common.modules.rotary import rotate, token_positions
from tests.common.inputs import SIDES, padding, qkv
from tests.compare import assert_close, gradients

#: Those that can be causal and need nothing of a host; the contract's tests rotate around the others too. Left out, as
#: hosts do, are those whose own rotation would be a second one and those without dot products.
LEFT_OUT = ("combiner", "daft_conv", "daft_full", "mixed_chunk")
INNER = [
    name
    for name, attention in ATTENTIONS.items()
    if "causal" in attention.supports and not attention.needs and name not in LEFT_OUT
]
names = pytest.mark.parametrize("name", INNER)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def rotary(name, causal=False):
    return RotaryAttention(build_attention(name, causal=causal), 4)


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


@names
@causality
def test_it_is_the_inner_attention_of_rotated_queries_and_keys(name, causal):
    q, k, v = qkv(9, d=4)
    module = rotary(name, causal)
    assert isinstance(module.inner, ATTENTIONS[name]) and module.causal == causal
    positions = torch.arange(9)
    assert torch.equal(module(q, k, v), module.inner(rotate(q, positions), rotate(k, positions), v))
    assert not torch.allclose(module(q, k, v), module.inner(q, k, v))
    assert module.state_is_constant_size == module.inner.state_is_constant_size


def test_queries_and_keys_have_their_own_masks():
    """Cross-attention: each side counts its own real tokens."""
    (q, _, _), (_, k, v) = qkv(7, d=4), qkv(11, d=4, seed=1)
    queries, keys = padding("left", 2, 7), padding("left", 2, 11)
    out = rotary("softmax")(q, k, v, keys, queries)
    for b in range(2):
        alone = rotary("softmax")(q[b : b + 1, :, ~queries[b]], *(x[b : b + 1, :, ~keys[b]] for x in (k, v)))
        assert_close(f"row {b}", out[b : b + 1, :, ~queries[b]], alone)


@names
@pytest.mark.parametrize("side", ["none", "left", "holes", "all"])
def test_extend_continues_what_forward_does_at_once(side, name):
    inputs, mask = qkv(21, d=4), padding(side, 2, 21)
    module = rotary(name, causal=True)
    whole = module(*inputs, key_padding_mask=mask, query_padding_mask=mask)
    outputs, state, real = [], None, torch.zeros(2, dtype=torch.long)
    for part in torch.arange(21).split([5, 1, 1, 9, 1, 4]):
        piece_mask = None if mask is None else mask[:, part]
        out, state = module.extend(*(x[:, :, part] for x in inputs), padding_mask=piece_mask, state=state)
        outputs.append(out)
        real += len(part) if mask is None else (~piece_mask).sum(1)
        assert torch.equal(state["rotary_count"], real)
    out = torch.cat(outputs, dim=2)
    assert_close("out", out, whole)
    for which, actual, wanted in zip("qkv", gradients(out, inputs), gradients(whole, inputs)):
        assert_close(f"gradient of {which}", actual, wanted)


@names
def test_a_beam_reorder_is_an_index_select_of_dimension_0(name):
    order = torch.tensor([1, 1, 0])
    module, first, second, mask = rotary(name, True), qkv(7, d=4), qkv(3, batch=3, d=4, seed=1), padding("left", 2, 7)
    _, state = module.extend(*first, padding_mask=mask)
    before = {key: tensor.clone() for key, tensor in state.items()}
    selected = {key: tensor.index_select(0, order) for key, tensor in state.items()}
    out, _ = module.extend(*second, state=selected)
    whole = [torch.cat([x.index_select(0, order), y], dim=2) for x, y in zip(first, second)]
    whole_mask = torch.nn.functional.pad(mask.index_select(0, order), (0, 3))
    assert_close("out", out, module(*whole, whole_mask, whole_mask)[:, :, 7:])
    module.extend(*first, state=state)
    assert list(state) == list(before) and all(torch.equal(state[key], before[key]) for key in state)


@names
def test_wrong_states_masks_and_tensors_are_refused(name):
    module, (q, k, v) = rotary(name, causal=True), qkv(3, d=4)
    _, state = module.extend(q, k, v)
    wrong = [{}, [1], {"rotary_count": 3}, {"rotary_count": state["rotary_count"]}]
    wrong += [{key: tensor for key, tensor in state.items() if key != missing} for missing in state]
    wrong += [{**state, key: tensor[:1]} for key, tensor in state.items()]
    wrong += [{**state, "rotary_count": state["rotary_count"].float()}]
    for given in wrong:
        with pytest.raises(ValueError, match="^initial_state.* allowed"):
            module.extend(q, k, v, state=given)
    with pytest.raises(ValueError, match="^padding_mask has dtype torch.int64; allowed: torch.bool"):
        module.extend(q, k, v, padding_mask=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^padding_mask has shape \(2, 4\); allowed"):
        module.extend(q, k, v, padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    for i, argument in enumerate(("key_padding_mask", "query_padding_mask")):
        masks = [None, None]
        masks[i] = torch.zeros(2, 4, dtype=torch.bool)
        with pytest.raises(ValueError, match=rf"^{argument} has shape \(2, 4\); allowed"):
            module(q, k, v, *masks)
    with pytest.raises(ValueError, match="^k has shape"):
        module(q, k[:, :1], v)
    with pytest.raises(ValueError, match="causal is False"):
        rotary(name).extend(q, k, v)


def test_odd_heads_are_refused_when_the_module_is_built():
    with pytest.raises(ValueError, match="^head_dim is 5; allowed"):
        RotaryAttention(build_attention("flow"), 5)


def test_it_copies_and_prints_the_inner_attention():
    module, inputs = rotary("linear", causal=True), qkv(9, d=4)
    assert torch.equal(copy.deepcopy(module)(*inputs), module(*inputs))
    assert "(inner): LinearAttention(causal=True" in repr(module)


def test_images_alone_have_no_order_to_rotate_by():
    inner = build_attention("soft", num_heads=2, head_dim=8, spatial_dims=2)
    with pytest.raises(ValueError, match="inner.*'soft'.*sequences"):
        RotaryAttention(inner, 8)
