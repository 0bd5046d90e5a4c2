"""Flow-Attention: any shape, mask and option, the authors' modules, conservation, and the weights that it shows."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.ops import flow_attention, flow_attention_map, flow_attention_weights
from common.ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS
from common.ops.flow.reference import flow_attention_reference
from common.ops.shared.feature_maps import FEATURE_MAPS
from recipes.bench.peers import released_attention
from tests.common.inputs import FLOW_OPTIONS, name_of, padding, qkv
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
every_option = pytest.mark.parametrize("options", FLOW_OPTIONS, ids=name_of)
#: The authors' function -> our options.
PAIRS = [
    (released_attention.full, {}),
    (released_attention.image_model, {"form": "released_vision"}),
    (released_attention.causal, {"causal": True}),
    (released_attention.language_model, {"causal": True, "clamp": 5.0}),
]


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_shape_mask_cut_and_option(data):
    """Outputs are those of the reference, and causal ones are also those of pieces after the states between them."""
    causal = data.draw(st.booleans(), "causal")
    pieces = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), "pieces")
    n = sum(pieces)
    m = n if causal else data.draw(st.integers(1, 24), "m")
    batch = data.draw(st.integers(1, 3), "batch")
    sizes = {name: data.draw(st.integers(1, 5), name) for name in ("heads", "d", "e", "seed")}
    masked = data.draw(st.booleans(), "masks")

    def mask(tokens):
        rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
        masks = st.lists(rows, min_size=batch, max_size=batch).map(torch.tensor)
        return data.draw(masks if masked else st.none(), f"mask of {tokens}")

    options = {
        "form": data.draw(st.sampled_from(list(FORMS)), "form"),
        "clamp": data.draw(st.sampled_from([None, 0.5, 5.0, math.inf]), "clamp"),
        "phi": data.draw(st.sampled_from(["sigmoid", "elu+1"]), "phi"),
        "competition": data.draw(st.sampled_from(COMPETITIONS[: 3 if causal else 4]), "competition"),
        "allocation": data.draw(st.sampled_from(ALLOCATIONS), "allocation"),
    }
    masks = {"query_padding_mask": mask(n), "key_padding_mask": mask(m)}
    inputs, chunk_size = qkv(n, m, batch=batch, **sizes), data.draw(st.integers(1, 30), "chunk_size")
    expected = flow_attention_reference(*inputs, causal=causal, **masks, **options)
    out = flow_attention(*inputs, causal=causal, chunk_size=chunk_size, **masks, **options)
    assert_close("out", out, expected)
    if causal:
        outputs, state, begin = [], None, 0
        for length in pieces:
            part = slice(begin, begin + length)
            hidden = {name: None if x is None else x[:, part] for name, x in masks.items()}
            tokens, before = (x[:, :, part] for x in inputs), {"initial_state": state, "return_state": True}
            out, state = flow_attention(*tokens, causal=True, chunk_size=chunk_size, **hidden, **before, **options)
            outputs, begin = [*outputs, out], begin + length
        assert_close("in pieces", torch.cat(outputs, dim=2), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", [("softmax", "softmax"), ("sigmoid", "none"), ("none", "sigmoid")])
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_every_form_with_gates(by_channel, weights, form):
    tensors = dict(zip("qkv", qkv(13, d=4)))
    generator = torch.Generator().manual_seed(0)
    gates = -2.0 * torch.rand((2, 2, 13, *[4] * by_channel), generator=generator, dtype=torch.float64) ** 3
    tensors["log_decay"] = gates.requires_grad_()
    options = {"form": form, "competition": weights[0], "allocation": weights[1], "causal": True}
    out, expected = flow_attention(**tensors, **options, chunk_size=5), flow_attention_reference(**tensors, **options)
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, tensors)


@pytest.mark.parametrize("theirs, options", PAIRS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_released_forms_are_the_authors_modules(theirs, options):
    """No two of these agree to the tolerance used here."""
    for n, m, scale in ((1, 1, 1.0), (50, 50, 4.0), (130, 130, 1.0), (50, 20, 4.0), (20, 50, 1.0)):
        if n == m or "causal" not in options:
            inputs = qkv(n, m, d=16, e=16, scale=scale)
            out, expected = flow_attention(*inputs, **options), theirs(*inputs)
            assert_close("reference", flow_attention_reference(*inputs, **options), expected, 1e-12)
            assert_close("out", out, expected, 1e-12)
            assert_all_close("qkv", gradients(out, inputs), gradients(expected, inputs))
    inputs = qkv(300, d=32, e=32, dtype=torch.float32)
    assert_close("single precision", flow_attention(*inputs, **options), theirs(*inputs), 1e-5)
    inputs = qkv(50, d=16, e=16, scale=4.0)
    for other, _ in PAIRS:
        if other is not theirs:
            assert (other(*inputs) - theirs(*inputs)).norm() / theirs(*inputs).norm() > 1e-9


@causality
def test_options_that_mean_the_same(causal):
    """The paper has no clamp; None is infinity; below a clamp of 30, causal exponentials are summed directly."""
    inputs = qkv(50)
    paper = [flow_attention(*inputs, causal=causal, form="paper", clamp=clamp) for clamp in (0.1, 1.0, None)]
    assert torch.equal(paper[0], paper[1]) and torch.equal(paper[0], paper[2])
    unclamped = flow_attention(*inputs, causal=causal, clamp=None)
    for clamp in (25.0, 30.0, 31.0, math.inf):
        assert_close("out", flow_attention(*inputs, causal=causal, clamp=clamp), unclamped)


# --- conservation, equation 6, and what the weights show -------------------------------------------------------------


@causality
@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_every_sink_receives_and_every_source_gives_one_in_all(phi, causal):
    """Σ_j q_i·k_j / I_i = 1: without weights, the rows of the map; a source is a sink of the reversed flow."""
    q, k, _ = qkv(13, 13 if causal else 29)
    plain = {"form": "paper", "competition": "none", "allocation": "none", "phi": phi}
    for sinks, sources in ((q, k), (k, q)):
        received = flow_attention_map(sinks, sources, causal=causal, **plain).sum(-1)
        assert_close("what each receives", received, torch.ones_like(received))


@pytest.mark.parametrize("n, m", [(13, 29), (29, 13), (8, 8)])
def test_conserved_flows_sum_to_the_number_of_tokens(n, m):
    """Σ_j Ô_j = n, as each of n sinks takes 1, and Σ_i Î_i = m; both are recovered from sigmoid weights."""
    q, k, _ = qkv(n, m)
    competition, allocation = flow_attention_weights(q, k, form="paper", competition="sigmoid")
    assert_close("Σ Ô", competition.logit().sum(-1), torch.full((2, 2), float(n)).double())
    assert_close("Σ Î", allocation.logit().sum(-1), torch.full((2, 2), float(m)).double())
    for form, factors in (("released", (1.0, 1.0)), ("paper", (1 / m, 1 / n))):
        weights = flow_attention_weights(q, k, form=form, allocation="softmax")
        for weight, factor in zip(weights, factors):  # only released softmaxes are multiplied by the number of tokens
            assert_close("mean weight", weight.mean(-1), torch.full((2, 2), factor).double(), 1e-7)


@every_option
@causality
def test_the_map_times_the_values_is_the_output_and_is_made_of_the_weights(causal, options):
    """map = allocation_i · (q_i·k_j / I_i) · competition_j; the middle factor is the map without either weight."""
    q, k, v = qkv(11, 11 if causal else 17)
    masks = {"query_padding_mask": padding("left", 2, 11), "key_padding_mask": padding("right", 2, k.shape[2])}
    if causal:
        masks["key_padding_mask"] = masks["query_padding_mask"]
    attention_map = flow_attention_map(q, k, causal=causal, **masks, **options)
    assert_close("map @ v", attention_map @ v, flow_attention(q, k, v, causal=causal, **masks, **options))
    assert (attention_map >= 0).all() and not (causal and attention_map.triu(1).any())
    competition, allocation = flow_attention_weights(q, k, causal=causal, **masks, **options)
    middle = {**options, "competition": "none", "allocation": "none"}
    middle = flow_attention_map(q, k, causal=causal, **masks, **middle)
    assert_close("map", attention_map, allocation[..., None] * middle * competition[:, :, None])
    for weights, mask in ((competition, masks["key_padding_mask"]), (allocation, masks["query_padding_mask"])):
        assert (weights.masked_select(mask[:, None]) == 0).all()


@pytest.mark.parametrize("gates", [None, (2, 2, 11), (2, 2, 11, 5)], ids=["none", "head", "channel"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_the_weights_after_a_state_are_those_of_the_whole_sequence(side, gates):
    q, k, v = qkv(11)
    log_decay = None if gates is None else -torch.rand(gates, dtype=torch.float64)
    mask = padding(side, 2, 11)

    def part(begin, end):
        gate = None if gates is None else log_decay[:, :, begin:end]
        hidden = None if mask is None else mask[:, begin:end]
        return {"causal": True, "log_decay": gate, "key_padding_mask": hidden}

    whole = flow_attention_weights(q, k, **part(0, 11))
    _, state = flow_attention(*(x[:, :, :7] for x in (q, k, v)), **part(0, 7), return_state=True)
    later = flow_attention_weights(q[:, :, 7:], k[:, :, 7:], **part(7, 11), initial_state=state)
    for name, weights, expected in zip(("competition", "allocation"), later, whole):
        assert_close(name, weights, expected[:, :, 7:], 1e-9)


def test_tensors_of_a_state_share_no_memory_and_joining_heads_needs_no_copy():
    """A beam search that reorders one of them in place must not change another."""
    _, whole = flow_attention(*qkv(20), causal=True, chunk_size=8, return_state=True)
    _, step = flow_attention(*qkv(1), causal=True, initial_state=whole, return_state=True)
    for state in (whole, step):
        assert len({x.untyped_storage().data_ptr() for x in state.values()}) == len(state)
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(9, e=5)]
    assert flow_attention(*inputs).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kernels", "10")
def test_features_that_underflow_receive_and_give_nothing(kernels, monkeypatch):
    """The reference divides by their flow of 0; the output of other tokens is that without them."""
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", kernels)
    q, k, v = (x.detach() for x in qkv(6))
    rest = torch.tensor([0, 1, 3, 4, 5])
    q[:, :, 2], k[:, :, 2] = -2000.0, -2000.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"form": "paper", "competition": "none", "allocation": "none"}
    out = flow_attention(*leaves, **options)
    assert not out[:, :, 2].any() and all(x.isfinite().all() for x in gradients(out, leaves))
    assert_close("others", out[:, :, rest], flow_attention(*(x[:, :, rest] for x in leaves), **options))
