"""The cases of the benchmark at small sizes: every form is equal to its reference, and one that is not is found."""

from functools import partial

import pytest
import torch

from common import gau
from recipes.bench.cases import CASES, daft, flow, images, language_models, packages, rates
from recipes.bench.compare import first_unequal
from recipes.bench.memory import peak_beyond
from recipes.bench.models import decoding, timm_models, training
from recipes.bench.models.fairseq_models import build, random_tokens
from recipes.bench.peers import attention_maps, direct_convolution, released_attention
from recipes.bench.work import BACKWARD, DECODING, FORWARD, TRAINING, Absent, Form, Settings

HERE = Settings(quick=True)


def wrong(function, factor=1.01):
    """``function`` off by one part in a hundred."""
    return lambda *inputs, **options: function(*inputs, **options) * factor


def checked(forms):
    """Name -> the first tensor that differs, None where the form is equal to its reference."""
    found = {form.name: first_unequal(form.check()) for form in forms if isinstance(form, Form)}
    return {name: one and one.tensor for name, one in found.items()}


@pytest.fixture(autouse=True)
def fresh():
    """Comparisons and models that are kept for all sizes are those of the code as a test has it."""
    flow._literally.cache_clear()
    language_models._decoder.cache_clear()


def test_every_case_has_sizes_for_every_run():
    for name, case in CASES.items():
        assert case.name == name and case.sizes and case.quick_sizes and case.devices and case.note
        assert max(case.quick_sizes) <= max(case.sizes)
        for device in ("cpu", "cuda"):
            expected = case.sizes if device in case.devices else ()
            assert case.sizes_of(Settings(device)) == expected
            assert case.sizes_of(Settings(device, quick=True)) == (case.quick_sizes if expected else ())


# Flow-Attention


@pytest.mark.parametrize("build_forms", [flow.causal, flow.full], ids=["causal", "full"])
def test_flow(build_forms):
    forms = build_forms(HERE, 150)
    assert checked(forms) == {flow.OURS: None, flow.SOFTMAX: None, flow.AUTHORS: None}
    for form in forms:
        assert form.size == form.units == 150 and form.input_bytes == 3 * 8 * 150 * 64 * 4
        assert [tuple(x.shape) for x in form.runs[FORWARD]()] == [(1, 8, 150, 64)]
        out, *gradients = form.runs[BACKWARD]()
        assert out.requires_grad and [tuple(x.shape) for x in gradients] == [(1, 8, 150, 64)] * 3


def test_flow_in_half_precision():
    forms = flow.causal(HERE._replace(dtype=torch.bfloat16), 100)
    assert checked(forms)[flow.OURS] is None
    assert forms[0].runs[FORWARD]()[0].dtype == torch.bfloat16


@pytest.mark.parametrize("causal, build_forms", [(True, flow.causal), (False, flow.full)])
def test_wrong_flow_is_found(causal, build_forms, monkeypatch):
    right = flow.flow_attention

    def late(q, k, v, **options):  # right up to where the literal reference looks
        out = right(q, k, v, **options)
        return torch.cat([out[:, :, :120], out[:, :, 120:] * 1.01], dim=2)

    monkeypatch.setattr(flow, "flow_attention", late)
    assert checked(build_forms(HERE, 150))[flow.OURS] == "output"
    name = "causal" if causal else "full"
    monkeypatch.setattr(released_attention, name, wrong(getattr(released_attention, name)))
    found = checked(build_forms(HERE, 150))
    assert found[flow.AUTHORS] == "output" and found[flow.SOFTMAX] is None


def test_what_both_have_wrong_is_found_by_the_literal_reference(monkeypatch):
    monkeypatch.setattr(flow, "flow_attention", wrong(flow.flow_attention))
    monkeypatch.setattr(released_attention, "causal", wrong(released_attention.causal))
    assert checked(flow.causal(HERE, 60))[flow.OURS] == "output"


def test_the_authors_form_is_left_out_where_it_needs_too_much(monkeypatch):
    longest = flow._AUTHORS_LONGEST
    q, k, v = (torch.empty(1, 8, 4 * longest, 64, device="meta") for _ in range(3))
    assert "more time than the rest" in flow._too_large([q, k, v])
    monkeypatch.setattr(flow, "_SHARE", 1e-9)
    absent = flow.causal(HERE, 100)[-1]
    assert isinstance(absent, Absent) and absent.name == flow.AUTHORS and absent.size == 100
    assert absent.reason.startswith("it needs 0.1 GiB; allowed here: 0.0")


def test_the_authors_form_really_needs_that_much():
    authors = flow.causal(HERE, 64)[-1]
    products = 8 * 64 * 64 * 64 * 4  # one (n, d, e) tensor per head
    assert 2 * products < peak_beyond(authors.runs[BACKWARD], "cpu") <= flow._PRODUCTS * products


def test_fla_is_named_where_it_is_missing():
    forms = flow.with_fla(HERE, 70)
    assert [form.name for form in forms] == [flow.OURS, flow.SOFTMAX, flow.FLA]
    assert forms[-1].reason == "not installed: pip install flash-linear-attention"


def test_rates():
    product, copy = rates.rates(HERE, 64)
    assert checked([product, copy]) == {rates.PRODUCT: None, rates.COPY: None}
    assert product.units == 2 * 64**3 and copy.units == 2 * 16 * 64 * 64 * 4


# DAFT


def test_daft_and_a_wrong_one(monkeypatch):
    forms = daft.causal(HERE, 90)
    assert checked(forms) == {daft.OURS: None, daft.DIRECT: None}
    assert len(forms[0].runs[BACKWARD]()) == 5
    right = direct_convolution.daft_conv
    monkeypatch.setattr(direct_convolution, "daft_conv", lambda q, k, v, r: right(q, k, v, r.flip(1)))
    assert checked(daft.causal(HERE, 90))[daft.DIRECT] == "output"


def test_the_map_of_daft_has_a_window_that_ends_with_the_token():
    q, k, v, r = daft._inputs(HERE, 90)
    with torch.no_grad():
        changed = attention_maps.daft_conv(q, k, torch.cat([v[:, :50], v[:, 50:] + 1.0], dim=1), r)
        assert torch.equal(changed[:, :50], attention_maps.daft_conv(q, k, v, r)[:, :50])


# other packages


@pytest.mark.parametrize("build_forms, ours, theirs", [
    (packages.gated_attention_unit, packages.GAU, packages.FLASH),
    (packages.performer, packages.LINEAR, packages.PERFORMER),
])  # fmt: skip
def test_peers_are_equal_where_they_are_installed(build_forms, ours, theirs):
    forms = build_forms(HERE, 300)
    assert [form.name for form in forms] == [ours, theirs]
    if isinstance(forms[1], Absent):
        assert forms[1].reason == "not installed: pip install '.[bench]'"
    else:  # the same function: the weights are the same too
        mine, other = (form.runs[FORWARD]()[0] for form in forms)
        assert (mine - other).norm() <= 1e-4 * mine.norm()
    assert set(checked(forms).values()) == {None}
    assert len(forms[0].runs[BACKWARD]()) > 3


def test_wrong_blocks_are_found(monkeypatch):
    monkeypatch.setattr(gau, "mixed_chunk_attention", wrong(gau.mixed_chunk_attention, 1.05))
    assert checked(packages.gated_attention_unit(HERE, 300))[packages.GAU] == "output"
    monkeypatch.setattr(packages, "linear_attention", wrong(packages.linear_attention))
    assert checked(packages.performer(HERE, 100))[packages.LINEAR] == "output"


# language models


def test_training_and_a_wrong_model(monkeypatch):
    monkeypatch.setattr(language_models, "_TRAINING_LAYERS", 1)
    forms = language_models.training(64)(HERE, 300)
    assert checked(forms) == {"flash_lm": None, "transformer_pp_lm": None}
    for form in forms:
        assert form.runs[TRAINING]() == []
        assert checked([form])[form.name] is None  # of what training has made of it
    monkeypatch.setattr(gau, "mixed_chunk_attention", wrong(gau.mixed_chunk_attention, 1.05))
    found = checked(language_models.training(64)(HERE, 300))
    assert found["flash_lm"] is not None and found["transformer_pp_lm"] is None


def test_a_training_step_changes_every_parameter():
    parameter = torch.ones(3, requires_grad=True)
    step = training.training_step(lambda: (parameter * torch.tensor([1.0, 2.0, -1.0])).sum(), [parameter])
    assert step() == [] and parameter.grad is None
    assert (parameter.detach() != 1.0).all()


def test_the_map_refuses_what_it_has_no_form_for():
    unit = gau.GatedAttentionUnit(16, chunk_size=4, causal=False)
    with training.attention_written_out(), pytest.raises(ValueError, match="causal is False"):
        unit(torch.randn(1, 9, 16))
    unit = gau.GatedAttentionUnit(16, chunk_size=4, causal=True, kernel="laplace")
    with training.attention_written_out(), pytest.raises(ValueError, match="laplace"):
        unit(torch.randn(1, 9, 16))


@pytest.fixture
def small_decoders(monkeypatch):
    monkeypatch.setattr(language_models, "_DECODING_WIDTH", 64)
    monkeypatch.setattr(language_models, "_DECODING_LAYERS", 1)


def test_decoding_at_two_positions_gives_the_logits_of_the_full_forward(small_decoders):
    forms = language_models.decoding(HERE, 300)
    places = [(form.name, form.size) for form in forms]
    assert places == [(name, place) for name in language_models.DECODED for place in (128, 300)]
    for form in forms:
        assert first_unequal(form.check()) is None
        once, again = form.runs[DECODING](), form.runs[DECODING]()  # a step leaves its state as it was
        assert torch.equal(once[0], again[0]) and form.units == 1


@pytest.mark.parametrize("architecture", language_models.DECODED)
def test_decoding_from_another_state_is_found(architecture, small_decoders):
    model = language_models._decoder(architecture, HERE, 300)
    tokens = random_tokens(HERE, 280)
    twin = build("softmax_lm", 64, 1, 300, HERE).eval() if architecture == "transformer_lm" else None
    if twin is not None:
        twin.load_state_dict(model.state_dict())
    state, expected = decoding.reach(model, tokens, twin)
    changed = torch.cat([tokens[:, :-3], tokens[:, -3:-1] + 1, tokens[:, -1:]], dim=1)
    other, _ = decoding.reach(model, changed, twin)
    (found,) = decoding.decoding_step(model, tokens, state)()
    (far,) = decoding.decoding_step(model, tokens, other)()
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (far - expected).norm() > 1e-3 * expected.norm()


# image models


@pytest.fixture
def narrow(monkeypatch):
    """Hierarchical models of few channels and blocks."""
    small = partial(timm_models.build, embed_dims=(48, 96, 144, 192), depths=(1, 2, 1, 1))
    monkeypatch.setattr(timm_models, "build", small)
    monkeypatch.setattr(images, "_BATCH", 1)


def test_hierarchical_models_and_a_wrong_one(narrow, monkeypatch):
    forms = images.hierarchical(HERE, 32)
    assert checked(forms) == {images.HIERARCHICAL: None, images.RELEASED_HEADS: None, images.AUTHORS: None}
    model = timm_models.build(images.HIERARCHICAL, 32, HERE)
    state = timm_models.authors_parameters(model)
    assert sum(x.numel() for name, x in state.items() if not name.endswith(".gamma")) == sum(
        x.numel() for x in model.parameters()
    )
    right = timm_models.released_forward
    monkeypatch.setattr(timm_models, "released_forward", lambda x, state, depths, heads: right(x, state, depths, 4))
    assert checked([images._hierarchical(images.HIERARCHICAL, HERE, 32)])[images.HIERARCHICAL] is not None


def test_deit_and_a_wrong_one(monkeypatch):
    forms = images.deit(HERE, 32)
    assert checked(forms) == {images.FLOW: None, images.SOFTMAX: None}
    monkeypatch.setattr(released_attention, "full", wrong(released_attention.full))
    assert checked(forms[:1])[images.FLOW] is not None


def test_softmax_attention_that_is_not_fused_is_refused(monkeypatch):
    monkeypatch.setattr("timm.models.vision_transformer.Attention.fused_attn", False, raising=False)
    monkeypatch.setattr("timm.layers.attention.use_fused_attn", lambda: False)
    with pytest.raises(ValueError, match="attention that is not fused"):
        timm_models.build(images.SOFTMAX, 32, HERE)


@pytest.mark.parametrize("module, names", [("fairseq", language_models.DECODED), ("timm", (images.FLOW,))])
def test_hosts_that_are_missing_are_named(module, names, monkeypatch):
    monkeypatch.setattr("recipes.bench.packages.importlib.util.find_spec", lambda name: None)
    built = {
        "fairseq": lambda: language_models.decoding(HERE, 300) + language_models.training(64)(HERE, 64),
        "timm": lambda: images.deit(HERE, 32) + images.hierarchical(HERE, 32),
    }[module]()
    assert {form.reason for form in built} == {f"not installed: pip install '.[{module}]'"}
    assert set(names) <= {form.name for form in built}
