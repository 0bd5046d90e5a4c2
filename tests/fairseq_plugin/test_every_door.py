"""Every model that a document trains leaves by every door and is the same behind it, or one line says why not."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from fairseq_plugin import LinearTimeLanguageModel, export_hf, export_step, from_safetensors, import_hf, to_safetensors
from fairseq_plugin.export.decoding_step import DecodingStep
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.audio import recording
from tests.fairseq_plugin.helpers.averages import averaged
from tests.fairseq_plugin.helpers.language_models import awake
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.shown_models import Shown, shown_models, write_data
from tests.fairseq_plugin.helpers.tasks import set_up
from tests.fairseq_plugin.helpers.text import padded, tokens
from tests.fairseq_plugin.helpers.transfer import save_trained

SHOWN = {f"{shown.places[0]} {shown.arch} {shown.task}": shown for shown in shown_models()}
#: Tasks whose models transformers takes: those of one text, or of a source and a target.
TEXTS = ("language_modeling", "streaming_language_modeling", "context_parallel_language_modeling", "masked_lm")
TEXTS += ("sentence_prediction", "translation")
#: One model of each architecture.
TRACED = set({shown.arch: name for name, shown in reversed(SHOWN.items())}.values())


class Trained(NamedTuple):
    """A model, how to make it anew with other weights, its checkpoint as fairseq-train writes it, and its data."""

    shown: Shown
    build: Callable[[int], nn.Module]
    model: nn.Module
    checkpoint: Path
    data: Path

    def beside(self, name: str) -> str:
        """A path beside the checkpoint."""
        return str(self.checkpoint.with_name(name))


@pytest.fixture(autouse=True, scope="module")
def plain_pytorch():
    """Compute without kernels for CPUs, which take seconds to load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINEARTIME_CPU_KERNELS", "0")
        yield


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model that a document trains, in small, with random weights under which every part shows."""
    shown, folder = SHOWN[request.param], tmp_path_factory.mktemp("trained")
    task, config = set_up(write_data(shown, folder / "data"), *shown.arguments)

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return awake(randomised(task.build_model(copy.deepcopy(config.model)), 0.2, seed)).eval()

    model = build(1)
    save_trained(folder / "model.pt", config, model)
    return Trained(shown, build, model, folder / "model.pt", folder / "data")


@torch.no_grad()
def outputs(model: nn.Module, task: str) -> Tensor | None:
    """Outputs for two rows, one of them padded; None for tasks with inputs of their own."""
    sequence = torch.cat([tokens(1, 20), padded(tokens(1, 14, seed=1), 0, 6)])
    if task == "translation":
        return model(sequence, sequence.ne(1).sum(1), tokens(2, 9, seed=2))[0]
    if task == "sentence_prediction":
        return model(sequence, classification_head_name="sentence_classification_head")[0]
    if task == "audio_pretraining":
        return model(recording(2, 4000), mask=False, features_only=True)["x"]
    return model(sequence)[0][sequence.ne(1)] if task in TEXTS else None


def check_same(model: nn.Module, trained: Trained) -> None:
    """Every weight and every record in the state dict, and the outputs."""
    model.eval()  # it returns None for a loaded language model
    assert type(model) is type(trained.model)
    states = [x.state_dict() for x in (model, trained.model)]
    # from_pretrained of fairseq folds a normalised weight into one tensor
    assert {name for name in states[0].keys() ^ states[1].keys() if "pos_conv" not in name} == set()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0].keys() & states[1].keys())
    found, expected = (outputs(x, trained.shown.task) for x in (model, trained.model))
    if expected is not None:
        assert_close("outputs", found, expected)


def load(path: str, trained: Trained) -> Any:
    """The model of a checkpoint, as fairseq's commands load it."""
    return load_model_ensemble_and_task([path], {"data": str(trained.data)})[0][0]


def hub(trained: Trained) -> None:
    """``from_pretrained`` of the model's class, which torch.hub calls."""
    folder, name = trained.checkpoint.parent, trained.checkpoint.name
    found = ARCH_MODEL_REGISTRY[trained.shown.arch].from_pretrained(str(folder), name, str(trained.data))
    check_same(found.models[0] if hasattr(found, "models") else found.model, trained)


@torch.no_grad()
def average(trained: Trained) -> None:
    """The mean of two checkpoints, in a file like theirs, is a model with the mean of their weights."""
    state, other, mean = torch.load(trained.checkpoint, weights_only=True), trained.build(2), trained.build(3)
    torch.save({**state, "model": averaged([state["model"], other.state_dict()])}, trained.beside("mean.pt"))
    for parameter, *parts in zip(*(x.parameters() for x in (mean, trained.model, other)), strict=True):
        parameter.copy_((parts[0] + parts[1]) / 2)
    check_same(load(trained.beside("mean.pt"), trained), trained._replace(model=mean))


def transformers(trained: Trained) -> None:
    """``export_hf``, which compares the outputs in both libraries, and ``import_hf``, which goes back."""
    export_hf.main([str(trained.checkpoint), trained.beside("hf"), "--data", str(trained.data)])
    import_hf.main([trained.beside("hf"), trained.beside("back.pt")])
    check_same(load(trained.beside("back.pt"), trained), trained)


def safetensors(trained: Trained) -> None:
    """``to_safetensors`` and ``from_safetensors``."""
    folder, back = trained.beside("safetensors"), trained.beside("again")
    to_safetensors.main([str(trained.checkpoint), folder, "--dict", str(trained.data / "dict.txt")])
    from_safetensors.main([folder, back])
    check_same(load(f"{back}/model.pt", trained), trained)


@torch.no_grad()
def step(trained: Trained) -> None:
    """The graph of ``export_step`` gives, token by token, the logits of the forward pass."""
    target, sequence = trained.beside("step.pt2"), tokens(2, 9)
    export_step.main([str(trained.checkpoint), target, "--data", str(trained.data)])
    graph, expected = torch.export.load(target).module(), trained.model(sequence)[0]
    state = DecodingStep(trained.model).initial_state(2)
    for i in range(sequence.shape[1]):
        logits, *state = graph(sequence[:, i : i + 1], torch.arange(2), *state)
        assert_close(f"step {i}", logits, expected[:, i])


DOORS: dict[str, Callable[[Trained], None]] = {
    "hub": hub,
    "average": average,
    "transformers": transformers,
    "safetensors": safetensors,
    "step": step,
}


def refusal(shown: Shown, door: str) -> str:
    """What the line that refuses a model names; empty for a door through which it goes."""
    ours, named = ARCH_MODEL_REGISTRY[shown.arch], f"--arch {shown.arch}"
    if door == "transformers" and shown.task not in TEXTS:
        return f"{named}|--task {shown.task}"
    if door in ("safetensors", "step") and not issubclass(ours, LinearTimeLanguageModel):
        return named
    return "--arch, or --lineartime-layers" if door == "step" and "softmax" in f"{shown.arch}{shown.arguments}" else ""


#: Of the models that ``export_step`` takes, one of each architecture, since tracing takes seconds.
PAIRS = [
    (name, door)
    for name, shown in SHOWN.items()
    for door in DOORS
    if door != "step" or refusal(shown, door) or name in TRACED
]


@pytest.mark.parametrize(("trained", "door"), PAIRS, indirect=["trained"])
def test_a_model_leaves_by_every_door(trained: Trained, door: str) -> None:
    named = refusal(trained.shown, door)
    if not named:
        DOORS[door](trained)
        return
    with pytest.raises(SystemExit) as refused:
        DOORS[door](trained)
    line = str(refused.value)
    assert re.search(named, line) and "allowed" in line and "\n" not in line


def test_documents_for_newcomers_are_read() -> None:
    places = {place.partition(":")[0] for shown in SHOWN.values() for place in shown.places}
    assert {"README.md", "fairseq_plugin/README.md", "recipes/guides/own_data.md", "recipes/demo"} <= places
