"""record_attention shows the weights of every Flow-Attention inside any model."""

import pytest
import torch
from torch import nn

from common.attention import AttentionRecord, FlowAttention, LinearAttention, record_attention
from tests.common.inputs import padding, qkv


class Model(nn.Module):
    """Two Flow-Attentions, called in the order in which they were not made, and a linear one."""

    def __init__(self):
        super().__init__()
        self.first = FlowAttention(causal=True)
        self.others = nn.ModuleList([LinearAttention(), FlowAttention(form="paper", allocation="softmax")])

    def forward(self, q, k, v, mask):
        v = self.others[1](q=q, k=k, v=v, key_padding_mask=mask)
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
    expected = model.others[1].weights(q, k, key_padding_mask=mask)
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


def test_a_module_alone_is_recorded_under_the_empty_name():
    module = FlowAttention()
    with record_attention(module) as records:
        module(*qkv(5))
    assert [record.name for record in records] == [""]


def test_a_model_without_flow_attention_is_refused():
    match = "model is a Sequential without Flow-Attention; allowed: a model that holds one"
    with pytest.raises(ValueError, match=match), record_attention(nn.Sequential(LinearAttention())):
        pass
