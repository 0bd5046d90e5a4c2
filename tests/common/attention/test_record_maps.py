"""record_attention(model, maps=True): the implied map of every mechanism against explicitly computed maps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.attention import (
    ATTENTIONS,
    LinearAttention,
    MapRecord,
    OutputGateAttention,
    RfaAttention,
    SoftmaxAttention,
    build_attention,
    record_attention,
)
from common.modules import GatedAttentionUnit
from tests.common.contract.mechanisms import CASES, PLAIN, Case, both, cases, tensors
from tests.common.inputs import padding
from tests.compare import TOLERANCES, assert_close


def recorded(module: nn.Module, *inputs, **named) -> MapRecord:
    """The single record of a call."""
    with record_attention(module, maps=True) as records:
        module(*inputs, **named)
    assert len(records) == 1
    return records[0]


@cases(PLAIN)
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
    if case.name == "daft_full":
        return  # against the formula, below
    assert_close("out", expected, out, tolerance=1e-6)
    assert_close("summed", record.summed, record.map.sum(2))


@pytest.mark.parametrize("causal", [False, True])
def test_the_map_of_daft_full(causal: bool):
    """Softmax over sources of w + k for each channel, averaged over channels."""
    module = Case("daft_full", causal).build()
    inputs = tensors(module, 7, grad=False)
    w = module.position_bias()[:7, :7]
    if causal:
        w = w.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    logits = w[..., None] + inputs["k"][:, :, None]  # (B, H, n, m, d)
    assert_close("map", recorded(module, **inputs).map, logits.softmax(3).mean(4))


def test_flow_attention_has_competition_and_allocation_as_well():
    """The map contains both: competition weights the sources, and the sink's gate makes a row sum to less than 1."""
    module = build_attention("flow", form="paper").double()
    q, k, v = (torch.randn(2, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    record = recorded(module, q, k, v)
    assert_close("map", record.map, module.attention_map(q, k))
    competition, allocation = module.weights(q, k)
    assert_close("competition", record.competition, competition)
    assert_close("allocation", record.allocation, allocation)
    q, k = q.sigmoid(), k.sigmoid()
    incoming, outgoing = (q * k.sum(2, keepdim=True)).sum(3), (k * q.sum(2, keepdim=True)).sum(3)
    conserved_in = (q * (k / outgoing[..., None]).sum(2, keepdim=True)).sum(3)
    conserved_out = (k * (q / incoming[..., None]).sum(2, keepdim=True)).sum(3)
    shares = q @ k.transpose(2, 3) / incoming[..., None]
    expected = conserved_in.sigmoid()[..., None] * shares * conserved_out.softmax(2)[:, :, None]
    assert_close("map", record.map, expected)


class Model(nn.Module):
    """A linear and a softmax attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([LinearAttention(), SoftmaxAttention()])

    def forward(self, q, k, v):
        return self.layers[1](q, k, self.layers[0](q, k, v), dropout_p=0.5)


def test_every_attention_of_a_model_is_recorded_and_its_output_stays():
    q, k, v = (torch.randn(2, 2, 8, 4) for _ in range(3))
    model = Model()
    torch.manual_seed(1)
    plain = model(q, k, v)
    torch.manual_seed(1)
    with record_attention(model, maps=True) as records:
        assert torch.equal(model(q, k, v), plain)
    assert [record.name for record in records] == ["layers.0", "layers.1"]
    assert all(record.competition is None and record.allocation is None for record in records)
    assert torch.allclose(records[1].map.sum(3), torch.ones(2, 2, 8)), "without attention dropout"


def test_directions_that_are_drawn_anew_are_those_of_the_call():
    module = RfaAttention(num_heads=2, head_dim=4, features=3).double()
    inputs = tensors(module, 9, grad=False)
    torch.manual_seed(3)
    plain = module(**inputs)
    torch.manual_seed(3)
    with record_attention(module, maps=True) as records:
        assert torch.equal(module(**inputs), plain)
    assert_close("out", records[0].map @ inputs["v"], plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_the_map_of_a_gated_attention_unit(chunk_size: int | None, causal: bool):
    """The unit's output is x + (U ⊙ map V) W_o."""
    unit = GatedAttentionUnit(
        8, query_dim=6, heads=2, causal=causal, chunk_size=chunk_size, max_positions=None if chunk_size else 16
    )
    unit = unit.double().eval()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    x, mask = torch.randn(2, 11, 8, dtype=torch.float64), padding("left", 2, 11)
    record = recorded(unit, x, padding_mask=mask)
    u, v, _ = (F.silu(part) for part in unit.in_proj(unit.norm(x)).split(unit.widths, dim=-1))
    out = record.map @ v.unflatten(-1, (2, -1)).transpose(1, 2)
    expected = x + unit.out_proj(u * out.transpose(1, 2).flatten(2))
    assert_close("out", expected[~mask], unit(x, mask)[~mask])


def test_what_cannot_be_recorded_is_refused():
    """The message names a mechanism without competition; decoding only has sums; the model may hold none of ours."""
    match = "without Flow-Attention; allowed: .*linear, softmax have neither competition nor allocation.*maps=True"
    with pytest.raises(ValueError, match=match), record_attention(Model()):
        pass
    with pytest.raises(ValueError, match="without attention of lineartime"), record_attention(nn.ReLU(), maps=True):
        pass
    module, x = LinearAttention(causal=True), torch.randn(1, 1, 4, 2)
    with record_attention(module, maps=True) as records:
        _, state = module.extend(x, x, x)
        with pytest.raises(ValueError, match="maps is True .* continues a sequence; allowed"):
            module.extend(x, x, x, state=state)
    assert_close("map", records[0].map, records[0].map.tril())


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


@cases(case for case in CASES if case.kind.weighted_mean and not case.rotary and case.forget == "none")
def test_no_option_makes_a_weight_of_a_mean_negative(case: Case) -> None:
    module = case.build()
    weights = module.attention_matrix(**tensors(module, 13, grad=False))
    assert (weights >= 0).all() and (weights.sum(-1) <= 1 + TOLERANCES[torch.float32]).all()
