"""record_attention and record_keys show the weights of every Flow-Attention and DAFT inside any model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.attention import (
    AttentionRecord,
    DaftConvAttention,
    DaftFullAttention,
    FlowAttention,
    KeyRecord,
    LinearAttention,
    record_attention,
    record_keys,
)
from tests.common.inputs import padding, qkv
from tests.compare import assert_close


def none_of(mask):
    """A mask for this many tokens, none of which is padding."""
    return None if mask is None else torch.zeros_like(mask)


class Model(nn.Module):
    """Two Flow-Attentions, called in another order than they were created in, and a linear attention."""

    def __init__(self):
        super().__init__()
        self.first = FlowAttention(causal=True)
        self.others = nn.ModuleList([LinearAttention(), FlowAttention(form="paper", allocation="softmax")])

    def forward(self, q, k, v, mask):
        v = self.others[1](q=q, k=k, v=v, key_padding_mask=mask, query_padding_mask=none_of(mask))
        v = self.others[0](q, k, v)
        return self.first(q, k, v, mask, mask)


def test_one_record_per_call_with_the_masks_of_the_call():
    q, k, v = qkv(9)
    model, mask = Model(), padding("left", 2, 9)
    plain = model(q, k, v, mask)
    with record_attention(model) as records:
        assert torch.equal(model(q, k, v, mask), plain)
        assert [record.name for record in records] == ["others.1", "first"]
        with torch.no_grad():
            model(k, q, v, mask)
    assert [record.name for record in records] == ["others.1", "first"] * 2
    model(q, k, v, mask)
    assert len(records) == 4, "recording ends with the block"

    by_name, by_position = records[:2]
    assert isinstance(by_name, AttentionRecord)
    expected = model.others[1].weights(q, k, mask, torch.zeros_like(mask))
    assert torch.equal(by_name.competition, expected[0]) and torch.equal(by_name.allocation, expected[1])
    expected = model.first.weights(q, k, mask, mask)
    assert torch.equal(by_position.competition, expected[0]) and torch.equal(by_position.allocation, expected[1])
    assert (by_position.competition.masked_select(mask[:, None]) == 0).all()
    assert not any(tensor.requires_grad for record in records for tensor in record[1:])


def test_recording_ends_when_the_block_fails():
    model, inputs = Model(), qkv(9)
    with pytest.raises(RuntimeError, match="stop"), record_attention(model) as records:
        raise RuntimeError("stop")
    model(*inputs, None)
    assert records == []


def test_one_recording_inside_another():
    q, k, v = qkv(5)
    module = FlowAttention()
    with record_attention(module) as outer:
        with record_attention(module, maps=True) as inner:
            module(q, k, v)
        module(q, k, v)
    assert (len(outer), len(inner)) == (2, 1)
    module(q, k, v)
    assert len(outer) == 2 and not {"forward", "extend"} & set(vars(module))


def test_a_model_without_flow_attention_is_refused():
    match = "model is a Sequential without Flow-Attention; allowed"
    with pytest.raises(ValueError, match=match), record_attention(nn.Sequential(LinearAttention())):
        pass


class DaftModel(nn.Module):
    """Both kinds of DAFT, with another attention between them."""

    def __init__(self):
        super().__init__()
        self.full = DaftFullAttention(max_tokens=9, bias_dim=2)
        self.others = nn.ModuleList([LinearAttention(), DaftConvAttention(num_heads=2, window=3, query=False)])

    def forward(self, q, k, v):
        k = k + 1.0
        v = self.others[1](None, k=k[..., :1], v=v)
        v = self.others[0](q, k, v)
        return self.full(q, k, v)


def test_one_record_of_keys_per_call():
    q, k, v = qkv(9, d=4, e=4, dtype=torch.float32)
    model = DaftModel()
    plain = model(q, k, v)
    with record_keys(model) as records:
        assert torch.equal(model(q, k, v), plain)
        with torch.no_grad():
            model(k, q, v)
    model(q, k, v)
    assert [record.name for record in records] == ["others.1", "full"] * 2, "recording ends with the block"
    assert all(isinstance(record, KeyRecord) and not record.keys.requires_grad for record in records)
    assert torch.equal(records[0].keys, (k + 1.0)[..., :1]) and torch.equal(records[1].keys, k + 1.0)
    assert torch.equal(records[3].keys, q + 1.0)
    assert list(records[0].keys.shape) == [2, 2, 9, 1]


def test_keys_of_generation_are_copies():
    q, k, v = (x.detach() for x in qkv(9, d=4, e=4, dtype=torch.float32))
    module, state, expected = DaftFullAttention(causal=True, max_tokens=9), None, k.clone()
    with record_keys(module) as records:
        for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
            _, state = module.extend(*(x[:, :, part] for x in (q, k, v)), state=state)
    k.zero_()
    assert torch.equal(torch.cat([record.keys for record in records], dim=2), expected)
    assert {record.name for record in records} == {""}


def test_a_model_without_daft_is_refused():
    match = "model is a Sequential without DAFT; allowed"
    with pytest.raises(ValueError, match=match), record_keys(nn.Sequential(FlowAttention())):
        pass


def test_a_block_without_a_call_is_refused():
    with (
        pytest.raises(ValueError, match="2 modules of Flow-Attention were not called.*allowed"),
        record_attention(Model()),
    ):
        pass


@pytest.mark.parametrize("side", ["none", "left"])
def test_generation_records_the_weights_of_the_whole_sequence(side):
    """Allocation is a token's own; competition is normalised over the tokens so far: only the last one is compared."""
    q, k, v = (x.detach() for x in qkv(9))
    module, mask = FlowAttention(causal=True), padding(side, 2, 9)
    competition, allocation = module.weights(q, k, mask, mask)
    with record_attention(module) as records:
        state = None
        for part in torch.arange(9).split([4, 1, 1, 3]):
            part_mask = None if mask is None else mask[:, part]
            _, state = module.extend(*(x[:, :, part] for x in (q, k, v)), padding_mask=part_mask, state=state)
    assert len(records) == 4, "one for each call"
    assert_close("allocation", torch.cat([record.allocation for record in records], dim=2), allocation)
    assert_close("competition", torch.cat([record.competition for record in records], dim=2), competition)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_activation_checkpointing_records_each_module_once(reentrant):
    model, inputs = Model(), qkv(9)
    with record_attention(model) as records:
        out = checkpoint(model, *inputs, None, use_reentrant=reentrant)
        out.sum().backward()
    assert [record.name for record in records] == ["others.1", "first"]


def test_a_compiled_model_is_recorded_as_the_model_is():
    """The block takes the modules out of a graph that was compiled before it."""
    torch._dynamo.reset()
    model, inputs = Model(), [x.detach() for x in qkv(9)]
    compiled = torch.compile(model, backend="eager")
    compiled(*inputs, None)
    with record_attention(model) as expected:
        model(*inputs, None)
    with record_attention(compiled) as records:
        compiled(*inputs, None)
    assert len(records) == len(expected) == 2
    for record, other in zip(records, expected):
        assert record.name.endswith(other.name)
        assert_close("competition", record.competition, other.competition)
        assert_close("allocation", record.allocation, other.allocation)
