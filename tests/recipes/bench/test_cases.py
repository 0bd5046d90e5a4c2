"""Every case at a small size: all candidates equal their references, and one that does not is noticed."""

import pytest
import torch
from fairseq.models import FairseqIncrementalDecoder

from common.attention import ATTENTIONS, FlowAttention
from common.modules import GatedAttentionUnit
from common.modules.forget_gate import ForgetGate
from common.ops import mixed_chunk
from recipes.bench.cases import (
    CASES,
    attention_steps,
    attentions,
    forgetting,
    gated_attention_unit,
    images,
    language_models,
    operations,
    prompts,
    rates,
    translation,
)
from recipes.bench.harness import packages
from recipes.bench.harness.compare import first_unequal
from recipes.bench.harness.memory import peak_beyond
from recipes.bench.harness.operations import candidates
from recipes.bench.harness.work import BACKWARD, DECODING, FORWARD, TRAINING, Absent, Candidate, Settings
from recipes.bench.models import decoding, timm_models, training
from recipes.bench.models.fairseq_models import build, random_tokens
from recipes.bench.peers import attention_maps

HERE = Settings(quick=True)
#: More than a chunk of the causal forms; references take time with its square.
LENGTH = 70
ROWS = {operation.name: operation for operation in operations.OPERATIONS}
NARROW = dict(batch=1, embed_dims=(48, 96, 144, 192), depths=(1, 2, 1, 1))


@pytest.fixture(autouse=True)
def run_as_it_is_written():
    """torch.compile changes nothing: of one backward pass it would make machine code for half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def wrong(function, factor=1.05):
    """``function`` times ``factor``."""
    return lambda *inputs, **options: function(*inputs, **options) * factor


def unequal(built):
    """Name -> the first tensor that differs from the reference, None where the candidate is equal to it."""
    found = {one.name: first_unequal(one.check()) for one in built if isinstance(one, Candidate)}
    return {name: one and one.tensor for name, one in found.items()}


def test_every_case_has_sizes_for_every_run():
    for name, case in CASES.items():
        assert case.name == name and case.sizes and case.quick_sizes and case.devices and case.note
        assert max(case.quick_sizes) <= max(case.sizes)
        for device in ("cpu", "cuda"):
            runs_here = device in case.devices
            assert case.sizes_of(Settings(device)) == (case.sizes if runs_here else ())
            assert case.sizes_of(Settings(device, quick=True)) == (case.quick_sizes if runs_here else ())


# Operations


@pytest.mark.parametrize("name", ROWS)
def test_operations_equal_their_references(name):
    row = ROWS[name]
    built = candidates(row, HERE, LENGTH)
    assert [one.name for one in built] == [function.name for function in row.functions]
    for one, function in zip(built, row.functions):
        if isinstance(one, Absent):
            reasons = [packages.missing(function.package)] if function.package else [function.refusal(HERE, LENGTH)]
            assert [one.reason] == reasons
            continue
        shapes = [tuple(shape) for shape in row.shapes(LENGTH)]
        assert one.size == LENGTH and one.units == shapes[0][0] * LENGTH
        assert one.input_bytes == 4 * sum(map(torch.Size.numel, map(torch.Size, shapes[:3])))
        assert [tuple(x.shape) for x in one.runs[FORWARD]()] == [shapes[2]]
        out, *gradients = one.runs[BACKWARD]()
        assert out.requires_grad and [tuple(x.shape) for x in gradients] == shapes
    assert not any(unequal(built).values())


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_operation_is_noticed_by_each_of_its_checks(name):
    """A check may compare the function with another option, so both are made wrong."""
    row = ROWS[name]
    for function in row.functions:
        for check in function.checks:
            other = check._replace(function=wrong(check.function or function.call))
            broken = row._replace(functions=(function._replace(checks=(other,)),))
            (one,) = candidates(broken, HERE, 60)
            assert isinstance(one, Absent) or first_unequal(one.check()).tensor == "output"


def test_the_compiled_row_goes_through_the_compiler():
    """The contract of each mechanism compiles both passes, and a benchmark compares what it has compiled."""
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        operations.compiled_flow(*torch.randn(3, 1, 2, 5, 4))


def test_an_operation_that_is_wrong_from_some_length_on_is_noticed():
    row = ROWS["causal_flow"]
    ours = row.functions[0]

    def late(call):
        return lambda q, k, v: torch.cat([call(q, k, v)[:, :, :120], call(q, k, v)[:, :, 120:] * 1.01], dim=2)

    checks = tuple(check._replace(function=late(check.function or ours.call)) for check in ours.checks)
    broken = row._replace(functions=(ours._replace(checks=checks),))
    assert unequal(candidates(broken, HERE, 150)) == {operations.FLOW: "output"}


def test_operations_in_half_precision():
    row = ROWS["causal_flow"]
    built = candidates(row._replace(functions=row.functions[:1]), HERE._replace(dtype=torch.bfloat16), 100)
    assert unequal(built) == {operations.FLOW: None}
    assert built[0].runs[FORWARD]()[0].dtype == torch.bfloat16


def test_the_authors_form_is_left_out_where_it_takes_too_long_or_too_much_memory():
    assert operations.authors_refusal(HERE, 64) is None
    assert "run up to" in operations.authors_refusal(HERE, 4096) or "GiB" in operations.authors_refusal(HERE, 4096)
    assert "allowed here" in operations.authors_refusal(HERE, 2**30)
    (authors,) = candidates(ROWS["causal_flow"]._replace(functions=ROWS["causal_flow"].functions[2:]), HERE, 64)
    tensor = 8 * 64 * 64 * 64 * 4  # (n, d, e) per head
    assert 2 * tensor < peak_beyond(authors.runs[BACKWARD], "cpu") <= 5 * tensor, "the estimate of its memory holds"


def test_rates():
    product, copy = rates.rates(HERE, 64)
    assert not any(unequal([product, copy]).values())
    assert product.units == 2 * 64**3 and copy.units == 2 * 16 * 64 * 64 * 4


def test_the_map_of_daft_is_causal():
    q, k, v, r = (torch.randn(shape) for shape in ROWS["daft_conv"].shapes(90))
    changed = attention_maps.daft_conv(q, k, torch.cat([v[:, :50], v[:, 50:] + 1.0], dim=1), r)
    assert torch.equal(changed[:, :50], attention_maps.daft_conv(q, k, v, r)[:, :50])


def test_the_gated_attention_unit_and_its_peer(monkeypatch):
    built = gated_attention_unit.gated_attention_unit(HERE, 300)
    assert [one.name for one in built] == [gated_attention_unit.GAU, gated_attention_unit.FLASH]
    assert not any(unequal(built).values())
    if isinstance(built[1], Candidate):  # it has the same weights, so it gives the same output
        ours, theirs = (one.runs[FORWARD]()[0] for one in built)
        assert (ours - theirs).norm() <= 1e-4 * ours.norm()
    monkeypatch.setattr(mixed_chunk, "mixed_chunk_attention", wrong(mixed_chunk.mixed_chunk_attention))
    assert unequal(gated_attention_unit.gated_attention_unit(HERE, 300)[:1]) == {gated_attention_unit.GAU: "output"}


# Language models


def test_training_and_a_wrong_model(monkeypatch):
    built = language_models.training(64, layers=1)(HERE, 300)
    for one in built:
        assert unequal([one])[one.name] is None
        assert one.runs[TRAINING]() == []
        assert unequal([one])[one.name] is None, "after a training step"
    monkeypatch.setattr(mixed_chunk, "mixed_chunk_attention", wrong(mixed_chunk.mixed_chunk_attention))
    found = unequal(built)
    assert found["flash_lm"] is not None and found["transformer_pp_lm"] is None


def test_a_training_step_changes_every_parameter():
    parameter = torch.ones(3, requires_grad=True)
    step = training.training_step(lambda: (parameter * torch.tensor([1.0, 2.0, -1.0])).sum(), [parameter])
    assert step() == [] and parameter.grad is None
    assert (parameter.detach() != 1.0).all()


@pytest.mark.parametrize("options", [dict(causal=False), dict(causal=True, kernel="laplace")])
def test_the_map_refuses_options_that_it_does_not_compute(options):
    unit = GatedAttentionUnit(16, chunk_size=4, **options)
    with training.attention_written_out(), pytest.raises(ValueError, match="False|laplace"):
        unit(torch.randn(1, 9, 16))


def test_decoding_gives_the_logits_of_the_full_forward_at_both_positions():
    built = language_models.decoding(HERE, 300, width=64, layers=1)
    places = [(one.name, one.size) for one in built]
    assert places == [(name, place) for name in language_models.DECODED for place in (language_models.NEAR, 300)]
    for one in built:
        assert first_unequal(one.check()) is None
        first, second = one.runs[DECODING](), one.runs[DECODING]()
        assert torch.equal(first[0], second[0]), "a step leaves its state unchanged"
        assert one.units == 1


def test_steps_of_attentions_give_the_output_of_the_forward_and_a_wrong_state_is_noticed(monkeypatch):
    built = attention_steps.candidates(HERE, LENGTH)
    assert {one.name for one in built} == {name for name, each in ATTENTIONS.items() if "causal" in each.supports}
    assert not any(unequal(built).values())
    for one in built:
        first, second = one.runs[DECODING](), one.runs[DECODING]()
        assert torch.equal(first[0], second[0]), "a step leaves its state unchanged"
    right = FlowAttention.extend
    monkeypatch.setattr(
        FlowAttention, "extend", lambda self, *inputs, state=None, **others: right(self, *inputs, **others)
    )
    found = unequal(attention_steps.candidates(HERE, LENGTH))
    assert {name for name, tensor in found.items() if tensor is not None} == {"flow"}


def test_a_decoded_beam_gives_the_logits_of_the_full_forward():
    built = language_models.beam_decoding(HERE, 40, width=64, layers=1)
    assert [one.name for one in built] == list(language_models.DECODED)
    for one in built:
        assert first_unequal(one.check()) is None
        assert one.runs[DECODING]()[0].shape[0] == one.units == language_models.BEAM


def test_a_generated_beam_gives_the_logits_of_the_full_forward():
    built = language_models.beam_generation(HERE, 7)
    assert {"transformer_lm", "flash_lm", "reformer_lm", "flow_lm"} <= {one.name for one in built}
    assert not any(unequal(built).values())


def test_models_whose_sums_forget_equal_their_literal_references(monkeypatch):
    """A gate that is wrong by a twentieth is noticed."""
    names = ("linear_lm --linear-forget head", "flowformer_lm --flow-forget channel", "gla_lm")
    assert {*names} <= {*forgetting.FORGETTING}
    small = {"width": 64, "layers": 1, "names": names}
    built = forgetting.training(HERE, 80, **small)
    assert [one.name for one in built] == list(names) and not any(unequal(built).values())
    decoded = language_models.decoding(HERE, 12, **small, near=None)
    assert [one.name for one in decoded] == list(names) and not any(unequal(decoded).values())
    monkeypatch.setattr(ForgetGate, "forward", wrong(ForgetGate.forward))
    assert all(unequal(built[:2]).values())


def test_generation_behind_a_prompt_gives_the_scores_of_the_full_forward():
    built = prompts.generations(HERE, 300)
    assert [one.name for one in built] == list(prompts.FORMS)
    generated = [one.runs[prompts.GENERATION]()[0] for one in built]
    for one, found in zip(built, generated):
        assert first_unequal(one.check()) is None
        assert found.shape == (one.units + 1,)
    assert all(torch.equal(*pair) for pair in zip(generated[::2], generated[1::2]))


@pytest.mark.parametrize("architecture", language_models.DECODED)
def test_a_step_depends_on_the_state(architecture):
    model = build(architecture, 64, 1, 300, HERE).eval()
    twin = build("softmax_lm", 64, 1, 300, HERE).eval() if architecture == "transformer_lm" else None
    if twin is not None:
        twin.load_state_dict(model.state_dict())
    tokens = random_tokens(HERE, 280)
    state, expected = decoding.reach(model, tokens, twin)
    changed = torch.cat([tokens[:, :-1] + 1, tokens[:, -1:]], dim=1)  # all but the token that the step reads
    other, _ = decoding.reach(model, changed, twin)
    (right,), (far,) = (decoding.decoding_step(model, tokens, each)() for each in (state, other))
    assert (right - expected).norm() <= 1e-5 * expected.norm()
    assert (far - expected).norm() > 1e-3 * expected.norm()


# Encoder-decoders


@pytest.fixture(scope="module")
def translators():
    """A step of every form from two sources, at two positions."""
    return translation.decoding(HERE, 200, width=64, layers=1, positions=(20, 45))


def test_a_step_of_a_beam_gives_the_logits_of_the_full_forward(translators):
    assert not any(unequal(translators).values())
    for one in translators:
        ((run, step),) = one.runs.items()
        first, second = step(), step()
        assert torch.equal(first[0], second[0]), "a step leaves its state unchanged"
        assert first[0].shape[0] == translation.BEAM and one.units == 1 and run.startswith("at target position")


def test_the_state_of_linear_forms_has_one_size_for_any_source_and_target(translators):
    kept = {name: [one.input_bytes for one in translators if one.name == name] for name in translation.FORMS}
    assert all(len(each) == 4 for each in kept.values())
    for name, (near, far, long_near, long_far) in kept.items():
        assert (near == long_near and far == long_far) == (name in translation.FLAT), name
        assert (near == far) == name.startswith("flowformer")
    assert kept[translation.STOCK][0] > 2 * kept["softmax"][0], "only ours keeps a source once for its beam"


def two_translators(monkeypatch, *names):
    """A step of the forms called ``names`` alone."""
    monkeypatch.setattr(translation, "FORMS", {name: translation.FORMS[name] for name in names})
    return translation.decoding(HERE, 128, width=64, layers=1, positions=(20,))


def test_a_wrong_attention_to_the_source_is_noticed(monkeypatch):
    """In decoding, where the comparison is with the attention of the whole target."""
    linear = ATTENTIONS["linear"]
    monkeypatch.setattr(linear, "attend_source", wrong(linear.attend_source))
    found = unequal(two_translators(monkeypatch, "flowformer + softmax", "flowformer + linear"))
    assert found == {"flowformer + softmax": None, "flowformer + linear": "logits"}


def test_a_beam_that_is_not_reordered_is_noticed(monkeypatch):
    monkeypatch.setattr(FairseqIncrementalDecoder, "reorder_incremental_state_scripting", lambda *arguments: None)
    found = unequal(two_translators(monkeypatch, translation.STOCK, "flowformer + linear"))
    assert found == {translation.STOCK: "logits", "flowformer + linear": "logits"}


@pytest.mark.parametrize("name", language_models.TRAINED)
def test_the_least_work_of_a_training_step(name):
    """Sizes are the model's. Twice the tokens are twice the work of flash_lm, and more than that of Transformer++."""
    layers, width = language_models.TRAINING_LAYERS, 512
    least = language_models.training_work(width, layers, name, 8192, TRAINING)
    model = build(name, width, layers, 64, HERE)
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    distinct = {weight.data_ptr(): weight.numel() for weight in linear}
    assert least.numbers == pytest.approx(8 * sum(distinct.values()), rel=0.01)
    for unit in (module for module in model.modules() if isinstance(module, GatedAttentionUnit)):
        assert (unit.chunk_size, unit.query_dim) == (language_models.CHUNK, language_models.QUERY)
        assert unit.expanded_dim == 2 * width
    shorter = language_models.training_work(width, layers, name, 4096, TRAINING)
    assert (least.operations == 2 * shorter.operations) is (name == "flash_lm")


# Image models


def test_hierarchical_models_and_a_wrong_one(monkeypatch):
    built = images.hierarchical(HERE, 32, **NARROW)
    names = (images.HIERARCHICAL, images.RELEASED_HEADS, images.AUTHORS, images.NO_ATTENTION)
    assert unequal(built) == dict.fromkeys(names)
    right = timm_models.released_forward
    monkeypatch.setattr(timm_models, "released_forward", lambda x, state, depths, heads: right(x, state, depths, 4))
    assert unequal(built[:1])[images.HIERARCHICAL] is not None
    monkeypatch.setattr(timm_models, "attention_to_itself", timm_models.authors_attention)
    assert unequal(built[3:])[images.NO_ATTENTION] is not None


def test_the_authors_model_has_all_our_parameters():
    model = timm_models.build(images.HIERARCHICAL, 32, HERE, embed_dims=NARROW["embed_dims"], depths=NARROW["depths"])
    state = timm_models.authors_parameters(model)
    theirs = sum(x.numel() for name, x in state.items() if not name.endswith(".gamma"))
    assert theirs == sum(x.numel() for x in model.parameters())


def test_deit_and_a_wrong_one(monkeypatch):
    built = images.deit(HERE, 32, depth=2)
    assert unequal(built) == {images.FLOW: None, images.SOFTMAX: None}
    full = timm_models.released_attention.full
    monkeypatch.setattr(timm_models.released_attention, "full", wrong(full))
    assert unequal(built[:1])[images.FLOW] is not None


def test_softmax_attention_that_is_not_fused_is_refused(monkeypatch):
    monkeypatch.setattr("timm.models.vision_transformer.Attention.fused_attn", False, raising=False)
    monkeypatch.setattr("timm.layers.attention.use_fused_attn", lambda: False)
    with pytest.raises(ValueError, match=f"{images.SOFTMAX}.*fused"):
        timm_models.build(images.SOFTMAX, 32, HERE, depth=1)


@pytest.mark.parametrize("names", [("decoding", "flash_lm_256", "prompts", "translation_decoding"), ("deit", "hier")])
def test_cases_of_a_missing_host_name_it(names, monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    built = [one for name in names for one in CASES[name].build(HERE, 64)]
    assert all(isinstance(one, Absent) for one in built)
    assert len({one.reason for one in built}) == 1 and "not installed" in built[0].reason


# Registered attentions


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != attentions.SOFTMAX])
def test_every_registered_attention_has_a_case_that_equals_its_reference(name):
    built = CASES[f"attention_{name}"].build(HERE, 64)
    assert [one.name for one in built] == [name, attentions.SOFTMAX]
    assert not any(unequal(built).values())
    for one in built:
        assert set(one.runs) == {FORWARD, BACKWARD} and one.runs[BACKWARD]()[0].shape == (1, 8, 64, 64)


class WrongFlow(FlowAttention):
    """Flow-Attention whose outputs are off by one part in twenty."""

    def forward(self, *arguments, **options):
        return 1.05 * super().forward(*arguments, **options)


def test_a_wrong_registered_attention_is_noticed(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "wrong_flow", WrongFlow)
    found = unequal(attentions.candidates("wrong_flow", HERE, 64))
    assert found == {"wrong_flow": "output", attentions.SOFTMAX: None}


def test_an_attention_that_is_not_causal_runs_so(monkeypatch):
    monkeypatch.setattr(FlowAttention, "supports", frozenset({"bidirectional"}))
    assert not attentions.is_causal("flow")
    assert not any(unequal(attentions.candidates("flow", HERE, 64)).values())
