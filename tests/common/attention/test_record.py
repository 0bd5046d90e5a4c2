"""record_attention and record_keys show maps, weights and keys of the attention inside any model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.attention import (
    ATTENTIONS,
    DaftConvAttention,
    DaftFullAttention,
    FlowAttention,
    LinearAttention,
    OutputGateAttention,
    RfaAttention,
    SoftmaxAttention,
    record_attention,
    record_keys,
)
from common.modules import GatedAttentionUnit
from common.ops.shared.padding import zero_padded_tokens
from tests.common.contract.mechanisms import DEFAULTS, PATHS, PLAIN, Case, at, both, cases, tensors
from tests.common.inputs import padding, qkv
from tests.compare import TOLERANCES, assert_close


def recorded(module: nn.Module, *inputs, **named):
    """The single record of a call."""
    with record_attention(module, maps=True) as records:
        module(*inputs, **named)
    assert len(records) == 1
    return records[0]


# Maps


@cases([*PLAIN, *(case for case in DEFAULTS if case.name == "flow" and (case.short_conv or case.forget != "none"))])
@pytest.mark.parametrize("side", ["none", "left"])
def test_the_map_times_the_values_is_the_output(case: Case, side: str):
    """YOSO normalises its outputs, DAFT gates them by the query, and DAFT's keys have one weight per channel.

    Normalisation and gating of outputs follow the map. Values of the gated delta rule first go through silu.
    """
    module, n = case.build(), 11 if not case.image else 12
    inputs = tensors(module, n, grad=False)
    masks = {} if case.image else both(padding(side, 2, n))
    record, out = recorded(module, **inputs, **masks), module(**inputs, **masks)
    assert record.map.shape == (2, 2, n, n) and not record.map.requires_grad
    values = F.silu(inputs["v"]) if case.name in ("gated_delta", "kimi_delta") else inputs["v"]
    expected = record.map @ values
    if case.name == "yoso":
        expected = F.normalize(expected, dim=-1)
    if isinstance(module, OutputGateAttention):
        expected = module.finished(expected, inputs.get("x"), padding(side, 2, n))
    if case.name == "daft_conv":
        expected = expected * inputs["q"].sigmoid()
    if case.name == "daft_full":  # softmax over sources of w + k for each channel, averaged over channels
        if side == "none":
            hidden = torch.ones(n, n, dtype=torch.bool).triu(1 if case.causal else n)
            w = module.position_bias()[:n, :n].masked_fill(hidden, -torch.inf)
            logits = w[..., None] + inputs["k"][:, :, None]  # (B, H, n, m, d)
            assert_close("map", record.map, logits.softmax(3).mean(4))
        return
    assert_close("out", expected, out, tolerance=1e-6)
    assert_close("summed", record.summed, record.map.sum(2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_the_map_of_a_gated_attention_unit(chunk_size: int | None, causal: bool):
    """The unit's output is x + (U ⊙ map V) W_o."""
    lengths = {"chunk_size": chunk_size, "max_positions": None if chunk_size else 16}
    unit = GatedAttentionUnit(8, query_dim=6, heads=2, causal=causal, **lengths).double().eval()
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, mask = torch.randn(2, 11, 8, dtype=torch.float64), padding("left", 2, 11)
    record = recorded(unit, x, padding_mask=mask)
    u, v, _ = (F.silu(part) for part in unit.in_proj(unit.norm(x)).split(unit.widths, dim=-1))
    out = record.map @ v.unflatten(-1, (2, -1)).transpose(1, 2)
    expected = x + unit.out_proj(u * out.transpose(1, 2).flatten(2))
    assert_close("out", expected[~mask], unit(x, mask)[~mask])


def weighs_all_tokens(case: Case) -> bool:
    """Whether outputs are weighted means of all values, with weights that sum to 1, for most queries."""
    module, seen, n = case.build(std=2.0), None, 36
    for seed in range(6):  # relu features may be 0 for some tokens, and a normaliser may be below its floor
        inputs = tensors(module, n, grad=False, seed=seed)
        record = recorded(module, **inputs)
        sums, output = record.map.sum(3), module(**inputs)
        means = record.map @ inputs["v"]
        if (record.map < 0).any() or (sums > 1 + TOLERANCES[torch.float32]).any() or not torch.allclose(means, output):
            return False
        seen = record.map > 0 if seen is None else seen | (record.map > 0)
    visible = torch.ones(n, n, dtype=torch.bool).tril(0 if case.causal else n)
    whole = (sums > 1 - 10 * TOLERANCES[torch.float32]).double().mean()
    return bool(whole > 0.8) and bool(seen[..., visible].double().mean() > 0.995)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_weighted_mean_is_declared_where_it_is_one(name: str) -> None:
    """Windows skip tokens, gates and unit vectors give no means, and random features may be negative."""
    results = [weighs_all_tokens(case) for case in PLAIN if case.name == name]
    assert all(results) == ATTENTIONS[name].weighted_mean


@cases(case for case in PATHS if case.kind.weighted_mean and not case.rotary and case.forget == "none")
def test_no_option_makes_a_weight_of_a_mean_negative(case: Case) -> None:
    module = case.build()
    weights = module.attention_matrix(**tensors(module, 13, grad=False))
    assert (weights >= 0).all() and (weights.sum(-1) <= 1 + TOLERANCES[torch.float32]).all()


# Models


class Model(nn.Module):
    """Two Flow-Attentions, called in another order than they were created in, and a linear attention."""

    def __init__(self):
        super().__init__()
        self.first = FlowAttention(causal=True)
        self.others = nn.ModuleList([LinearAttention(), FlowAttention(form="paper", allocation="softmax")])

    def forward(self, q, k, v, mask=None):
        none = None if mask is None else torch.zeros_like(mask)
        v = self.others[1](q=q, k=k, v=v, key_padding_mask=mask, query_padding_mask=none)
        v = self.others[0](q, k, v)
        return self.first(q, k, v, mask, mask)


def test_one_record_per_call_with_the_masks_of_the_call():
    """In call order, detached, until the block ends; outputs stay."""
    (q, k, v), model, mask = qkv(9), Model(), padding("left", 2, 9)
    plain = model(q, k, v, mask)
    with record_attention(model) as records:
        assert torch.equal(model(q, k, v, mask), plain)
        with torch.no_grad():
            model(k, q, v, mask)
    model(q, k, v, mask)
    assert [record.name for record in records] == ["others.1", "first"] * 2
    for record, module, query_mask in (
        (records[0], model.others[1], torch.zeros_like(mask)),
        (records[1], model.first, mask),
    ):
        expected = module.weights(q, k, mask, query_mask)
        assert torch.equal(record.competition, expected[0]) and torch.equal(record.allocation, expected[1])
        assert (record.competition.masked_select(mask[:, None]) == 0).all()
    assert not any(tensor.requires_grad for record in records for tensor in record[1:])


def test_recording_ends_when_the_block_fails_and_blocks_may_be_nested():
    model, (q, k, v) = Model(), qkv(9)
    with pytest.raises(RuntimeError, match="stop"), record_attention(model) as records:
        raise RuntimeError("stop")
    with record_attention(model.first) as outer:
        with record_attention(model.first, maps=True) as inner:
            model(q, k, v)
        model(q, k, v)
    model(q, k, v)
    assert (len(records), len(outer), len(inner)) == (0, 2, 1)


def test_maps_are_without_attention_dropout_and_with_the_directions_of_the_call():
    (q, k, v), records, outputs = (torch.randn(2, 2, 8, 4) for _ in range(3)), [], []
    softmax, rfa = SoftmaxAttention(), RfaAttention(num_heads=2, head_dim=4, features=3)
    assert torch.allclose(recorded(softmax, q, k, v, dropout_p=0.5).map.sum(3), torch.ones(2, 2, 8))
    for call in (lambda: records.append(recorded(rfa, q, k, v)), lambda: outputs.append(rfa(q, k, v))):
        torch.manual_seed(1)
        call()
    assert records[0].competition is None is records[0].allocation
    assert_close("out of the directions that are drawn anew", records[0].map @ v, outputs[0], 1e-4)


class DaftModel(nn.Module):
    """Both kinds of DAFT."""

    def __init__(self):
        super().__init__()
        self.full = DaftFullAttention(max_tokens=9, bias_dim=2)
        self.conv = DaftConvAttention(num_heads=2, window=3, query=False)

    def forward(self, q, k, v):
        k = k + 1.0
        return self.full(q, k, self.conv(None, k=k[..., :1], v=v))


def test_one_record_of_keys_per_call():
    """Keys of generation are copies."""
    q, k, v = qkv(9, d=4, e=4, dtype=torch.float32)
    model = DaftModel()
    plain = model(q, k, v)
    with record_keys(model) as records:
        assert torch.equal(model(q, k, v), plain)
        with torch.no_grad():
            model(k, q, v)
    assert [record.name for record in records] == ["conv", "full"] * 2 and not records[0].keys.requires_grad
    for record, keys in zip(records, ((k + 1.0)[..., :1], k + 1.0, (q + 1.0)[..., :1], q + 1.0)):
        assert torch.equal(record.keys, keys)
    module, state, changed = DaftFullAttention(causal=True, max_tokens=9), None, k.detach().clone()
    with record_keys(module) as records, torch.no_grad():
        for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
            _, state = module.extend(*(x[:, :, part] for x in (q, changed, v)), state=state)
    changed.zero_()
    assert torch.equal(torch.cat([record.keys for record in records], dim=2), k)


def test_what_cannot_be_recorded_is_refused():
    """A model without such attention, a block without a call, maps while decoding; the message names what there is."""
    stock, q = nn.Sequential(LinearAttention(), SoftmaxAttention()), torch.randn(1, 1, 4, 2)
    for block, said in (
        (record_attention(stock), "without Flow-Attention; allowed: .*linear, softmax have neither.*maps=True"),
        (record_attention(nn.ReLU(), maps=True), "without attention of lineartime"),
        (record_keys(nn.Sequential(FlowAttention())), "model is a Sequential without DAFT; allowed"),
        (record_attention(Model()), "2 modules of Flow-Attention were not called.*allowed"),
    ):
        with pytest.raises(ValueError, match=said), block:
            pass
    module = LinearAttention(causal=True)
    with record_attention(module, maps=True) as records:
        _, state = module.extend(q, q, q)
        with pytest.raises(ValueError, match="maps is True .* continues a sequence; allowed"):
            module.extend(q, q, q, state=state)
    assert_close("map", records[0].map, records[0].map.tril())


@pytest.mark.parametrize(("side", "forget"), [("none", "none"), ("left", "none"), ("left", "head")])
@torch.no_grad()
def test_generation_records_the_weights_of_the_whole_sequence(side, forget):
    """Allocation is a token's own; competition is normalised over the tokens so far: only the last one is compared."""
    module, mask, state = Case("flow", True, forget=forget).build(), padding(side, 2, 9), None
    inputs = tensors(module, 9, grad=False)
    gates = None if forget == "none" else module.gate(zero_padded_tokens(inputs["x"], mask))
    flow, given = module if gates is None else module.inner, {"log_decay": gates, **both(mask)}
    competition, allocation = flow.weights(inputs["q"], inputs["k"], **given)
    out = flow.attention_map(inputs["q"], inputs["k"], **given) @ inputs["v"]
    assert_close("map times values", out, module(**inputs, **both(mask)))
    with record_attention(module) as records:
        for part in torch.arange(9).split([4, 1, 1, 3]):
            part_mask = None if mask is None else mask[:, part]
            _, state = module.extend(**at(inputs, part), padding_mask=part_mask, state=state)
    assert len(records) == 4, "one for each call"
    assert_close("allocation", torch.cat([record.allocation for record in records], dim=2), allocation)
    assert_close("competition", torch.cat([record.competition for record in records], dim=2), competition)


def test_activation_checkpointing_records_each_module_once():
    model, inputs = Model(), qkv(9, dtype=torch.float32)
    for reentrant in (False, True):
        with record_attention(model) as records:
            checkpoint(model, *inputs, use_reentrant=reentrant).sum().backward()
        assert [record.name for record in records] == ["others.1", "first"]


def test_a_compiled_model_is_recorded_as_the_model_is():
    """The block takes the modules out of a graph that was compiled before it."""
    torch._dynamo.reset()
    model, inputs = Model(), [x.detach() for x in qkv(9, dtype=torch.float32)]
    compiled = torch.compile(model, backend="eager")
    compiled(*inputs)
    found = []
    for each in (model, compiled):
        with record_attention(each) as records:
            each(*inputs)
        found.append(records)
    for record, other in zip(*found, strict=True):
        assert other.name.endswith(record.name)
        assert_close("competition", other.competition, record.competition)
        assert_close("allocation", other.allocation, record.allocation)
