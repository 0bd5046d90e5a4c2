"""Ablations of gates: the model and trained parameters of each variant's command."""

from argparse import Namespace

import pytest
import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.utils import import_user_module

from common.modules.forget_gate import ForgetGate
from recipes.shared.fairseq_models import model_options
from recipes.shared.language_models import names_with_gates
from recipes.shared.variants import NO_POSITIONS, mechanism_of, variant_notes, with_variants
from recipes.wikitext103 import gates
from recipes.wikitext103.gates import DEFAULT_MODELS, EXPERIMENT, Gates
from tests.processes import CHECKOUT

OPTIONS = Gates(
    models=["linear+fixed", f"flow+learned{NO_POSITIONS}", "linear+forget"],
    width=16,
    layers=1,
    heads=2,
    tokens_per_sample=16,
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(CHECKOUT)


def build(name: str):
    """The model that the command of a variant builds."""
    words = [str(word) for word in OPTIONS.model_arguments(name)]
    import_user_module(Namespace(user_dir=words[words.index("--user-dir") + 1]))
    options = model_options(["data", *words])
    dictionary = Dictionary()
    dictionary.add_symbol("a")
    task = tasks.language_modeling.LanguageModelingTask(options, dictionary, dictionary)
    return tasks.FairseqTask.build_model(task, options)


def gate_parameters(model: torch.nn.Module) -> dict[str, bool]:
    """For each parameter of the gates, whether it is trained."""
    [gate] = [module for module in model.modules() if isinstance(module, ForgetGate)]
    assert not gate.gate_proj.weight.any()
    return {name: x.requires_grad for name, x in gate.named_parameters()}


@pytest.mark.parametrize(
    ("name", "weight", "bias"),
    [("linear+fixed", False, False), ("flow+learned", False, True), ("linear+forget", True, True)],
)
def test_what_of_a_gate_is_trained(name, weight, bias):
    model = build(name)
    assert gate_parameters(model) == {"gate_proj.weight": weight, "gate_proj.bias": bias}
    assert model.decoder.embed_positions is not None
    assert build(name + NO_POSITIONS).decoder.embed_positions is None


def test_names_and_notes():
    assert set(DEFAULT_MODELS) <= set(names_with_gates())
    assert with_variants("linear")[:3] == ["linear", "linear+short_conv", "linear+forget"]
    assert with_variants("softmax") == ["softmax"] and mechanism_of("rfa_gate+short_conv") == "rfa_gate"
    assert len(variant_notes(["linear+forget/linear", "flow+forget+short_conv", "linear"])) == 2
    assert [note.partition(":")[0] for note in variant_notes(OPTIONS.models)] == [
        "+forget",
        "+fixed",
        "+learned",
        NO_POSITIONS,
    ]


def test_from_the_text_to_the_table(tmp_path, imported_already, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 60)
    arguments = ["--file", str(text), "--quick", "--seeds", "1", "--out", str(tmp_path / "out")]
    sizes = ["--width", "16", "--layers", "1", "--heads", "2", "--batch-tokens", "64", "--tokens-per-sample", "16"]
    assert gates.main([*arguments, *sizes, "--models", "linear+fixed"]) == 0
    output = capsys.readouterr().out
    assert "linear+fixed" in output and "stay as they are at first" in output and EXPERIMENT.command in output
