"""Every form of Flow-Attention against its literal reference, forward and in gradients, and its identities."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import flow_attention, flow_attention_map, flow_attention_weights
from common.ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS
from common.ops.flow.reference import flow_attention_reference
from common.ops.shared.feature_maps import FEATURE_MAPS
from tests.common.inputs import FLOW_OPTIONS, name_of, padding, qkv
from tests.compare import assert_close

# --- agreement with the reference ----------------------------------------------------------------------------------


def competitions(causal):
    """The supported competitions; competition over heads cannot be causal."""
    return [name for name in COMPETITIONS if not (causal and name == "softmax_heads")]


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_shape_mask_and_option_agrees(data):
    causal = data.draw(st.booleans(), "causal")
    n = data.draw(st.integers(1, 24), "n")
    m = n if causal else data.draw(st.integers(1, 24), "m")
    batch, heads = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "heads")
    d, e = data.draw(st.integers(1, 6), "d"), data.draw(st.integers(1, 6), "e")

    def mask(tokens):
        rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
        mask_rows = st.lists(rows, min_size=batch, max_size=batch).map(torch.tensor)
        return st.none() | mask_rows if causal else mask_rows if masked else st.none()

    masked = data.draw(st.booleans(), "both masks")

    options = {
        "form": data.draw(st.sampled_from(list(FORMS)), "form"),
        "clamp": data.draw(st.sampled_from([None, 0.5, 1.0, 5.0, math.inf]), "clamp"),
        "phi": data.draw(st.sampled_from(["sigmoid", "elu+1"]), "phi"),
        "competition": data.draw(st.sampled_from(competitions(causal)), "competition"),
        "allocation": data.draw(st.sampled_from(ALLOCATIONS), "allocation"),
        "query_padding_mask": data.draw(mask(n), "query_padding_mask"),
        "key_padding_mask": data.draw(mask(m), "key_padding_mask"),
    }
    inputs = qkv(n, m, batch=batch, heads=heads, d=d, e=e, seed=data.draw(st.integers(0, 999), "seed"))
    out = flow_attention(*inputs, causal=causal, chunk_size=data.draw(st.integers(1, 30), "chunk_size"), **options)
    assert_close("out", out, flow_attention_reference(*inputs, causal=causal, **options))


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", FLOW_OPTIONS[1:], ids=name_of)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_option_changes_the_output(causal, options):
    inputs = qkv(20)
    difference = flow_attention(*inputs, causal=causal, **options) - flow_attention(*inputs, causal=causal)
    # Only the 1e-6 added to each flow distinguishes the vision form.
    assert difference.abs().max() > (1e-9 if options == {"form": "released_vision"} else 1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_clamp_is_ignored_by_the_paper_and_none_is_infinity(causal):
    inputs = qkv(20)
    paper = [flow_attention(*inputs, causal=causal, form="paper", clamp=clamp) for clamp in (0.1, 1.0, None)]
    assert torch.equal(paper[0], paper[1]) and torch.equal(paper[0], paper[2])
    unclamped = [flow_attention(*inputs, causal=causal, clamp=clamp) for clamp in (None, math.inf)]
    assert torch.equal(*unclamped)


@pytest.mark.parametrize("clamp", [25.0, 30.0, 31.0])
def test_both_running_softmaxes_agree_where_they_meet(clamp):
    """Up to a clamp of 30, exponentials are summed directly, above it as logarithms; flows here are far below both."""
    inputs = qkv(50)
    expected = flow_attention(*inputs, causal=True, clamp=None)
    assert_close("out", flow_attention(*inputs, causal=True, clamp=clamp), expected)


@pytest.mark.parametrize("form, factor", [("released", 1.0), ("paper", 1.0 / 24)])
def test_only_the_released_forms_multiply_the_softmaxes_by_the_token_count(form, factor):
    q, k, _ = qkv(24)
    competition, allocation = flow_attention_weights(q, k, form=form, allocation="softmax")
    for weights in (competition, allocation):
        assert_close("mean weight", weights.mean(-1), torch.full((2, 2), factor, dtype=torch.float64))


# --- conservation, equation 6 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_sink_receives_one_in_all(causal, phi):
    """Σ_j q_i·k_j / I_i = 1: without competition and allocation, these are the rows of the map."""
    q, k, _ = qkv(13, 13 if causal else 29)
    plain = {"form": "paper", "competition": "none", "allocation": "none", "phi": phi}
    rows = flow_attention_map(q, k, causal=causal, **plain).sum(-1)
    assert_close("what each sink receives", rows, torch.ones_like(rows))


def test_every_source_gives_one_in_all():
    """Σ_i q_i·k_j / O_j = 1: a source is a sink of the reversed flow."""
    q, k, _ = qkv(13, 29)
    columns = flow_attention_map(k, q, form="paper", competition="none", allocation="none").sum(-1)
    assert_close("what each source gives", columns, torch.ones_like(columns))


@pytest.mark.parametrize("n, m", [(13, 29), (29, 13), (8, 8)])
def test_conserved_flows_sum_to_the_number_of_tokens(n, m):
    """Σ_j Ô_j = n, as each of n sinks takes 1, and Σ_i Î_i = m; both are recovered from sigmoid weights."""
    q, k, _ = qkv(n, m)
    competition, allocation = flow_attention_weights(q, k, form="paper", competition="sigmoid")
    assert_close("Σ Ô", competition.logit().sum(-1), torch.full((2, 2), float(n), dtype=torch.float64))
    assert_close("Σ Î", allocation.logit().sum(-1), torch.full((2, 2), float(m), dtype=torch.float64))


# --- weights and map -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", FLOW_OPTIONS, ids=name_of)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_map_times_the_values_is_the_output(causal, options):
    q, k, v = qkv(11, 11 if causal else 17)
    masks = {"query_padding_mask": padding("left", 2, 11), "key_padding_mask": padding("right", 2, k.shape[2])}
    attention_map = flow_attention_map(q, k, causal=causal, **masks, **options)
    assert attention_map.shape == (2, 2, 11, k.shape[2])
    assert_close("map @ v", attention_map @ v, flow_attention(q, k, v, causal=causal, **masks, **options))
    assert (attention_map >= 0).all()
    if causal:
        assert (attention_map.triu(1) == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", FORMS)
def test_the_map_is_made_of_the_weights(form, causal):
    """map = allocation_i · (q_i·k_j / I_i) · competition_j; the middle factor is the map without either weight."""
    q, k, _ = qkv(11, 11 if causal else 17)
    competition, allocation = flow_attention_weights(q, k, causal=causal, form=form)
    assert competition.shape == k.shape[:3] and allocation.shape == q.shape[:3]
    middle = flow_attention_map(q, k, causal=causal, form=form, competition="none", allocation="none")
    expected = allocation[..., None] * middle * competition[:, :, None]
    assert_close("map", flow_attention_map(q, k, causal=causal, form=form), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_weights_are_zero_at_padding_and_that_of_the_rest_alone_elsewhere(causal):
    q, k, _ = qkv(16)
    mask = padding("left", 2, 16)
    weights = flow_attention_weights(q, k, causal=causal, key_padding_mask=mask, query_padding_mask=mask)
    for b in range(2):
        real = ~mask[b]
        alone = flow_attention_weights(q[b : b + 1, :, real], k[b : b + 1, :, real], causal=causal)
        for name, actual, expected in zip(("competition", "allocation"), weights, alone):
            assert_close(name, actual[b : b + 1, :, real], expected)
            assert (actual[b, :, mask[b]] == 0).all()


def test_competition_of_the_paper_is_a_distribution_over_real_sources():
    q, k, _ = qkv(9, 16)
    masks = {"key_padding_mask": padding("holes", 2, 16), "query_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}
    competition, _ = flow_attention_weights(q, k, form="paper", **masks)
    assert_close("Σ competition", competition.sum(-1), torch.ones(2, 2, dtype=torch.float64))
