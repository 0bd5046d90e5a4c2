"""Every case at a small size: all candidates equal their references, and a wrong one is detected."""

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
from recipes.bench.harness.work import BACKWARD, FORWARD, TRAINING, Absent, Candidate, Settings
from recipes.bench.models import timm_models, training
from recipes.bench.models.fairseq_models import build

HERE = Settings(quick=True)
#: More than a chunk of the causal forms; the time of references is quadratic in it.
LENGTH = 70
ROWS = {operation.name: operation for operation in operations.OPERATIONS}
NARROW = dict(batch=1, embed_dims=(48, 96, 144, 192), depths=(1, 2, 1, 1))


@pytest.fixture(autouse=True)
def run_as_it_is_written():
    """torch.compile returns the function unchanged; compiling one backward pass would take half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def wrong(function, factor=1.05):
    """``function`` times ``factor``."""
    return lambda *inputs, **options: function(*inputs, **options) * factor


def unequal(built):
    """Name -> the first tensor that differs from the reference, None if all are equal."""
    mismatches = {
        candidate.name: first_unequal(candidate.check()) for candidate in built if isinstance(candidate, Candidate)
    }
    return {name: mismatch and mismatch.tensor for name, mismatch in mismatches.items()}


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
    assert [candidate.name for candidate in built] == [function.name for function in row.functions]
    for candidate, function in zip(built, row.functions):
        if isinstance(candidate, Absent):
            reasons = [packages.missing(function.package)] if function.package else [function.refusal(HERE, LENGTH)]
            assert [candidate.reason] == reasons
            continue
        shapes = [tuple(shape) for shape in row.shapes(LENGTH)]
        assert candidate.size == LENGTH and candidate.units == shapes[0][0] * LENGTH
        assert candidate.input_bytes == 4 * sum(map(torch.Size.numel, map(torch.Size, shapes[:3])))
        assert [tuple(x.shape) for x in candidate.runs[FORWARD]()] == [shapes[2]]
        out, *gradients = candidate.runs[BACKWARD]()
        assert out.requires_grad and [tuple(x.shape) for x in gradients] == shapes
    assert not any(unequal(built).values())


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("causal_flow_")])
def test_a_wrong_operation_is_noticed_by_each_of_its_checks(name):
    """A check may compare the function with another function, so both are made wrong."""
    row = ROWS[name]
    for function in row.functions:
        for check in function.checks:
            broken_check = check._replace(function=wrong(check.function or function.call))
            broken = row._replace(functions=(function._replace(checks=(broken_check,)),))
            (candidate,) = candidates(broken, HERE, 60)
            assert isinstance(candidate, Absent) or first_unequal(candidate.check()).tensor == "output"


def test_the_compiled_row_goes_through_the_compiler():
    """Only that the compiler is called: contract tests compile both passes, and benchmarks check compiled results."""
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        operations.compiled_flow(*torch.randn(3, 1, 2, 5, 4))


def test_the_authors_form_is_left_out_where_it_takes_too_long_or_too_much_memory():
    assert operations.authors_refusal(HERE, 64) is None
    assert "run up to" in operations.authors_refusal(HERE, 4096) or "GiB" in operations.authors_refusal(HERE, 4096)
    assert "allowed here" in operations.authors_refusal(HERE, 2**30)
    (authors,) = candidates(ROWS["causal_flow"]._replace(functions=ROWS["causal_flow"].functions[2:]), HERE, 64)
    tensor = 8 * 64 * 64 * 64 * 4  # (n, d, e) per head
    assert 2 * tensor < peak_beyond(authors.runs[BACKWARD], "cpu") <= 5 * tensor, "the estimate of its memory holds"


def test_the_gated_attention_unit_and_its_peer(monkeypatch):
    built = gated_attention_unit.gated_attention_unit(HERE, 300)
    assert [candidate.name for candidate in built] == [gated_attention_unit.GAU, gated_attention_unit.FLASH]
    assert not any(unequal(built).values())
    if isinstance(built[1], Candidate):  # equal weights give equal outputs
        gau_output, flash_output = (candidate.runs[FORWARD]()[0] for candidate in built)
        assert (gau_output - flash_output).norm() <= 1e-4 * gau_output.norm()
    monkeypatch.setattr(mixed_chunk, "mixed_chunk_attention", wrong(mixed_chunk.mixed_chunk_attention))
    assert unequal(gated_attention_unit.gated_attention_unit(HERE, 300)[:1]) == {gated_attention_unit.GAU: "output"}


# Language models


def test_training_and_a_wrong_model(monkeypatch):
    # As at the timed lengths: gated attention units compute their output again in the backward pass.
    monkeypatch.setattr("common.modules.gated_attention_unit.RECOMPUTED_FROM", 0)
    built = language_models.training(64, layers=1)(HERE, 300)
    for candidate in built:
        assert unequal([candidate])[candidate.name] is None
        assert candidate.runs[TRAINING]() == []
        assert unequal([candidate])[candidate.name] is None, "after a training step"
    monkeypatch.setattr(mixed_chunk, "mixed_chunk_attention", wrong(mixed_chunk.mixed_chunk_attention))
    mismatches = unequal(built)
    assert mismatches["flash_lm"] is not None and mismatches["transformer_pp_lm"] is None


@pytest.mark.parametrize("options", [{"causal": False}, {"causal": True, "kernel": "laplace"}])
def test_maps_refuse_options_that_they_do_not_compute(options):
    unit = GatedAttentionUnit(16, chunk_size=4, **options)
    with training.attention_written_out(), pytest.raises(ValueError, match="False|laplace"):
        unit(torch.randn(1, 9, 16))


def test_a_training_step_changes_every_parameter():
    parameter = torch.ones(3, requires_grad=True)
    step = training.training_step(lambda: (parameter * torch.tensor([1.0, 2.0, -1.0])).sum(), [parameter])
    assert step() == [] and parameter.grad is None
    assert (parameter.detach() != 1.0).all()


def test_models_whose_sums_forget_equal_their_literal_references(monkeypatch):
    """A gate that is wrong by 5 % is detected."""
    names = ("flowformer_lm --flow-forget channel", "gla_lm")
    assert {*names} <= {*forgetting.FORGETTING}
    small = {"width": 64, "layers": 1, "names": names}
    built = forgetting.training(HERE, 80, **small)
    assert [candidate.name for candidate in built] == list(names) and not any(unequal(built).values())
    decoded = language_models.decoding(HERE, 12, **small, near=None)
    assert [candidate.name for candidate in decoded] == list(names) and not any(unequal(decoded).values())
    monkeypatch.setattr(ForgetGate, "forward", wrong(ForgetGate.forward))
    assert all(unequal(built[:1]).values())


# Encoder-decoders


@pytest.fixture(scope="module")
def translators():
    """A decoding step of every form, for two sources and at two positions."""
    return translation.decoding(HERE, 200, width=64, layers=1, positions=(20, 45))


def test_translators_equal_the_full_forward(translators, monkeypatch):
    """Decoding a beam equals the full forward; a beam that is not reordered is detected."""
    assert not any(unequal(translators).values())
    assert all(step()[0].shape[0] == translation.BEAM for candidate in translators for step in candidate.runs.values())
    monkeypatch.setattr(FairseqIncrementalDecoder, "reorder_incremental_state_scripting", lambda *arguments: None)
    names = (translation.STOCK, "flowformer + linear")
    monkeypatch.setattr(translation, "FORMS", {name: translation.FORMS[name] for name in names})
    mismatches = unequal(translation.decoding(HERE, 128, width=64, layers=1, positions=(20,)))
    assert mismatches == dict.fromkeys(names, "logits")


def test_the_state_of_linear_forms_has_one_size_for_any_source_and_target(translators):
    input_bytes = {
        name: [candidate.input_bytes for candidate in translators if candidate.name == name]
        for name in translation.FORMS
    }
    assert all(len(counts) == 4 for counts in input_bytes.values())
    for name, (near, far, long_near, long_far) in input_bytes.items():
        assert (near == long_near and far == long_far) == (name in translation.FLAT), name
        assert (near == far) == name.startswith("flowformer")
    assert input_bytes[translation.STOCK][0] > 2 * input_bytes["softmax"][0], (
        "only ours keeps a source once for its beam"
    )


@pytest.mark.parametrize("name", language_models.TRAINED)
def test_the_least_work_of_a_training_step(name):
    """Sizes are the model's. Twice the tokens double the work of flash_lm, and more than double Transformer++'s."""
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


# Steps of decoding

#: A case at a small size, and its minimum number of candidates.
STEPS = {
    "decoding": (lambda: language_models.decoding(HERE, 300, width=64, layers=1), 2 * len(language_models.DECODED)),
    "beam": (lambda: language_models.beam_decoding(HERE, 40, width=64, layers=1), len(language_models.DECODED)),
    "generation": (lambda: language_models.beam_generation(HERE, 7), 10),
    "prompts": (lambda: prompts.generations(HERE, 300), len(prompts.FORMS)),
    "attentions": (lambda: attention_steps.candidates(HERE, LENGTH), 10),
    "rates": (lambda: rates.rates(HERE, 64), 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_gives_the_output_of_the_full_forward_and_leaves_its_state(name):
    build, least = STEPS[name]
    built = build()
    assert len(built) >= least and not any(unequal(built).values())
    for candidate in built if name != "prompts" else ():  # prompts are whole generations
        ((_, step),) = candidate.runs.items()
        assert torch.equal(step()[0], step()[0]), candidate.name


def test_a_step_from_another_state_is_noticed(monkeypatch):
    right = FlowAttention.extend
    monkeypatch.setattr(
        FlowAttention, "extend", lambda self, *inputs, state=None, **others: right(self, *inputs, **others)
    )
    mismatches = unequal(attention_steps.candidates(HERE, LENGTH))
    assert {name for name, tensor in mismatches.items() if tensor is not None} == {"flow"}


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
    built = [candidate for name in names for candidate in CASES[name].build(HERE, 64)]
    assert all(isinstance(candidate, Absent) for candidate in built)
    assert len({candidate.reason for candidate in built}) == 1 and "not installed" in built[0].reason


# Registered attentions


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != attentions.SOFTMAX])
def test_every_registered_attention_has_a_case_that_equals_its_reference(name):
    built = CASES[f"attention_{name}"].build(HERE, 64)
    assert [candidate.name for candidate in built] == [name, attentions.SOFTMAX]
    assert not any(unequal(built).values())
    for candidate in built:
        assert set(candidate.runs) == {FORWARD, BACKWARD} and candidate.runs[BACKWARD]()[0].shape == (1, 8, 64, 64)


class WrongFlow(FlowAttention):
    """Flow-Attention with outputs that are wrong by 5 %."""

    def forward(self, *arguments, **options):
        return 1.05 * super().forward(*arguments, **options)


def test_a_wrong_registered_attention_is_noticed(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "wrong_flow", WrongFlow)
    mismatches = unequal(attentions.candidates("wrong_flow", HERE, 64))
    assert mismatches == {"wrong_flow": "output", attentions.SOFTMAX: None}


def test_an_attention_that_is_not_causal_runs_so(monkeypatch):
    monkeypatch.setattr(FlowAttention, "supports", frozenset({"bidirectional"}))
    assert not attentions.is_causal("flow")
    assert not any(unequal(attentions.candidates("flow", HERE, 64)).values())
