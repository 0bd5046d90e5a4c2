"""Every kind of model that a document trains, and every option of a training, is the same behind every door.

Or one line says why it does not go: ``from_pretrained``, averages, transformers, safetensors, generation from prompts
and states, streams, and exported steps.
"""

import copy
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from fairseq_plugin import (
    LinearTimeLanguageModel,
    PromptedLanguageModelingTask,
    PromptState,
    export_hf,
    export_step,
    from_safetensors,
    import_hf,
    read_prompt,
    to_safetensors,
)
from fairseq_plugin.export.decoding_step import DecodingStep
from fairseq_plugin.modules.carried_state import CarriedState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers import encoder_decoders, language_models, masked_models
from tests.fairseq_plugin.helpers.audio import recording
from tests.fairseq_plugin.helpers.language_models import awake
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.shown_models import Shown, shown_models, write_data
from tests.fairseq_plugin.helpers.tasks import set_up
from tests.fairseq_plugin.helpers.text import padded, tokens
from tests.fairseq_plugin.helpers.transfer import save_trained

EOS = 2
DOCUMENTS = shown_models()
#: One of each model and task, since sizes of a model are no other code. What an option changes is below.
SHOWN = {f"{ARCH_MODEL_NAME_REGISTRY[shown.arch]} {shown.task}": shown for shown in reversed(DOCUMENTS)}
ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 20,40"
RESET = "--lineartime-reset-at-eos"
#: Architecture and options of a training of a language model, by what they are.
LANGUAGE = {
    "documents": f"linear_lm {RESET}",
    "documents, hybrid": f"hybrid_lm --lineartime-layers gated_delta,flow {RESET}",
    "documents, additions": f"linear_lm --linear-forget head --linear-short-conv 3 {RESET}",
    "hybrid": "hybrid_lm --lineartime-layers gated_delta,linear",
    "hybrid, softmax": "hybrid_lm --lineartime-layers gated_delta,softmax",
    "additions": "flowformer_lm --flow-forget channel --flow-short-conv 3",
    "redraw": "favor_lm --favor-features 16 --favor-redraw 1",
    "a limit": "cosformer_lm",
    "gated attention units": "flash_lm",
    "learned positions": "linear_lm --decoder-learned-pos",
    "no positions": "linear_lm --no-token-positional-embeddings",
    "post-norm": "linear_lm --lineartime-post-norm --layernorm-embedding --no-scale-embedding",
    "shared embeddings": "linear_lm --share-decoder-input-output-embed",
    "another width": "linear_lm --decoder-input-dim 16 --decoder-output-dim 16",
    "adaptive softmax": f"linear_lm {ADAPTIVE}",
    "adaptive input": f"linear_lm --adaptive-input --adaptive-input-cutoff 20,40 {ADAPTIVE}",
    "characters": "linear_lm --character-embeddings",
    "beginning of sentence": "linear_lm --add-bos-token",
    "activations": "linear_lm --offload-activations --checkpoint-activations --min-params-to-wrap 10",
    "layer drop": "linear_lm --decoder-layerdrop 0.5",
    "noise of blocks": "linear_lm --quant-noise-pq 0.1",
    "NormFormer": "linear_lm --scale-fc --scale-attn --scale-heads --scale-resids",
    "some parameters": "hedgehog_lm --lineartime-trained-parameters attention",
    "a stream": "linear_lm --task streaming_language_modeling --batch-size 2",
    "half precision": "linear_lm --memory-efficient-fp16 --store-ema",
}
MASKED = "--task masked_lm --criterion masked_lm"
LABELS = "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --max-positions 48"
PAIRS = "--task translation --source-lang de --target-lang en"
#: Of other models what the file decides by itself: a limit, heads, what learns, another attention, tied embeddings.
OTHERS = {
    "masked, a longest length": f"nystrom_mlm {MASKED} --max-positions 24",
    "masked, redraw, post-norm": f"favor_mlm {MASKED} --favor-features 16 --favor-redraw 1 --lineartime-post-norm",
    "masked, some parameters": f"hedgehog_mlm {MASKED} --lineartime-trained-parameters attention",
    "classifier, mean": f"flowformer_classifier {LABELS} --pooling mean",
    "classifier, arena": f"linear_classifier {LABELS} --classifier-style arena --classifier-dim 12",
    "classifier, masked": f"flash_mlm {LABELS} --flash-first-softmax --flash-first-to-all",
    "pairs, hybrid": f"hybrid {PAIRS} --lineartime-layers linear,softmax --lineartime-cross-attention flow_source",
    "pairs, adaptive softmax": f"linear {PAIRS} {ADAPTIVE} --encoder-learned-pos --decoder-learned-pos",
    "pairs, some parameters": f"hedgehog {PAIRS} --lineartime-trained-parameters attention",
}


def small(name: str, words: str) -> Shown:
    """A training of few and narrow layers."""
    arch, *options = words.split()
    task = options[options.index("--task") + 1] if "--task" in options else "language_modeling"
    sizes = language_models.small(arch) if name in LANGUAGE else masked_models.small(arch)
    sizes = encoder_decoders.SMALL if task == "translation" else [*sizes, "--tokens-per-sample", "48"]
    sizes = sizes if task != "sentence_prediction" else sizes[:-2]
    return Shown(arch, task, ("--task", task, "--arch", arch, *sizes, *options), [name])


OPTIONS = {name: small(name, words) for name, words in {**LANGUAGE, **OTHERS}.items()}
MODELS = {**SHOWN, **OPTIONS}
#: Tasks whose models transformers takes: those of one text, or of a source and a target.
TEXTS = ("language_modeling", "streaming_language_modeling", "context_parallel_language_modeling", "masked_lm")
TEXTS += ("sentence_prediction", "translation")
#: ``export_step`` traces one for seconds; export/test_decoding_step.py does it for every kind of operators.
TRACED = "gated_delta_lm language_modeling"


pytestmark = pytest.mark.usefixtures("plain_pytorch")


class Trained:
    """A model, how to make it anew with other weights, its checkpoint as fairseq-train writes it, and its data."""

    def __init__(self, shown: Shown, build: Callable[[int], nn.Module], config: Any, folder: Path) -> None:
        self.shown, self.build, self.model, self.data = shown, build, build(1), folder / "data"
        self.checkpoint = folder / "model.pt"
        save_trained(self.checkpoint, config, self.model)

    def beside(self, name: str) -> str:
        """A path beside the checkpoint."""
        return str(self.checkpoint.with_name(name))

    @cached_property
    def hub(self) -> Any:
        """Result of ``from_pretrained`` of the model's class, which torch.hub calls."""
        folder, name = self.checkpoint.parent, self.checkpoint.name
        return ARCH_MODEL_REGISTRY[self.shown.arch].from_pretrained(str(folder), name, str(self.data))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model in small, with random weights under which every part shows."""
    shown, folder = MODELS[request.param], tmp_path_factory.mktemp("trained")
    task, config = set_up(write_data(shown, folder / "data"), *shown.arguments)

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = awake(randomised(task.build_model(copy.deepcopy(config.model)), 0.2, seed))
        if request.param == "classifier, masked":
            model.register_classification_head("sentence_classification_head", num_classes=2)
        return model.eval()

    return Trained(shown, build, config, folder)


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


def check_same(model: nn.Module, trained: Trained, original: nn.Module | None = None) -> None:
    """Every weight and every record in the state dict, and the outputs, are those of the ``original``."""
    model.eval()  # it returns None for a loaded language model
    original = trained.model if original is None else original
    assert type(model) is type(original)
    states = [x.state_dict() for x in (model, original)]
    # from_pretrained of fairseq folds a normalised weight into one tensor
    assert {name for name in states[0].keys() ^ states[1].keys() if "pos_conv" not in name} == set()
    for name in states[0].keys() & states[1].keys():  # fairseq leaves a buffer of its adaptive modules uninitialised
        assert torch.equal(states[0][name], states[1][name]) or name.endswith("_float_tensor"), name
    found, expected = (outputs(x, trained.shown.task) for x in (model, original))
    if expected is not None:
        assert_close("outputs", found, expected)


def load(path: str, trained: Trained) -> Any:
    """The model of a checkpoint, as fairseq's commands load it."""
    return load_model_ensemble_and_task([path], {"data": str(trained.data)})[0][0]


def hub(trained: Trained) -> None:
    """``from_pretrained``, after which everything learns."""
    found = trained.hub
    model = found.models[0] if hasattr(found, "models") else found.model
    check_same(model, trained)
    if trained.shown.task == "sentence_prediction":
        head, row = "sentence_classification_head", tokens(1, 20)
        assert_close(
            "predicted", found.predict(head, row[0]), model(row, classification_head_name=head)[0].log_softmax(-1)
        )
    assert trained.shown not in OPTIONS.values() or all(x.requires_grad for x in model.parameters())


@torch.no_grad()
def average(trained: Trained) -> None:
    """The mean of two checkpoints, in a file like theirs, is a model with the mean of their weights.

    As fairseq's scripts/average_checkpoints.py: floats are divided by their number, and other numbers without a rest.
    """
    state, other, mean = torch.load(trained.checkpoint, weights_only=True), trained.build(2), trained.build(3)
    second, averaged = other.state_dict(), {}
    for name, x in state["model"].items():
        averaged[name] = (x + second[name]) / 2 if x.is_floating_point() else (x + second[name]) // 2
    torch.save({**state, "model": averaged}, trained.beside("mean.pt"))
    for parameter, *parts in zip(*(x.parameters() for x in (mean, trained.model, other)), strict=True):
        parameter.copy_((parts[0] + parts[1]) / 2)
    check_same(load(trained.beside("mean.pt"), trained), trained, mean)


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


def with_ends() -> Tensor:
    """Two rows of several sentences."""
    sequence = tokens(2, 20)
    sequence[:, 0] = sequence[0, 8] = sequence[0, 9] = sequence[1, 15] = EOS
    return sequence


def log_probabilities(model: nn.Module, output: tuple) -> Tensor:
    """Log-probabilities of every word after each token."""
    return model.get_normalized_probs(output, log_probs=True, sample=None)


@torch.no_grad()
def python_step(trained: Trained) -> None:
    """The step that is exported, token by token; tensors without values pass, so it can be exported."""
    step, sequence = DecodingStep(export_step.load(trained.checkpoint, str(trained.data))[1]), with_ends()
    state, rows = step.initial_state(2), torch.arange(2)
    expected = log_probabilities(trained.model, trained.model(sequence))
    for i in range(sequence.shape[1]):
        logits, *state = step(sequence[:, i : i + 1], rows, *state)
        assert_close(f"step {i}", logits.log_softmax(-1), expected[:, i])
    step.to("meta")(sequence.to("meta"), rows.to("meta"), *(x.to("meta") for x in state))


@torch.no_grad()
def generate(trained: Trained) -> None:
    """Prompts that are read at once, and those after a kept state, give what fairseq's own steps give."""
    hub, options = copy.copy(trained.hub), {"beam": 3, "max_len_b": 12}
    task, prompts = hub.task, [hub.encode("w3 w21 w7"), hub.encode("w5")]
    hub.models[0].eval()
    expected = hub.generate(prompts, **options)
    hub.task = PromptedLanguageModelingTask.of(task)
    found = hub.generate(prompts, **options)
    path = Path(trained.beside("state.safetensors"))
    read_prompt(hub, "w3 w21").save(path)
    hub.task = PromptedLanguageModelingTask.of(task, after=PromptState.load(path, hub.models, task.dictionary))
    found += hub.generate([hub.encode("w7")], **options)
    for rows, wanted in zip(found, [*expected, expected[0]], strict=True):
        for one, other in zip(rows, wanted, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            assert_close("scores", one["positional_scores"], other["positional_scores"], 1e-4)


@torch.no_grad()
def streams(trained: Trained) -> None:
    """Blocks, each after the state of the one before, as ``streaming_language_modeling`` evaluates a text."""
    model, sequence, before, found = load(str(trained.checkpoint), trained), with_ends(), None, []
    model.eval()
    for block in sequence.split(7, dim=1):
        carried = CarriedState(before)
        found.append(log_probabilities(model, model(block, incremental_state=carried)))
        before = carried.after
    assert_close("streams", torch.cat(found, dim=1), log_probabilities(trained.model, trained.model(sequence)))


#: The doors of a model that a document trains, and of the options of a language model.
DOORS: dict[str, Callable[[Trained], None]] = {x.__name__: x for x in (hub, average, transformers, safetensors, step)}
READERS: dict[str, Callable[[Trained], None]] = {x.__name__: x for x in (hub, generate, streams, python_step)}


def refusal(name: str, door: str) -> str:
    """Names in the line that refuses a model; empty for a door through which it goes."""
    shown = MODELS[name]
    ours, named = ARCH_MODEL_REGISTRY[shown.arch], f"--arch {shown.arch}"
    if door == "transformers" and name.startswith("adaptive"):
        return "--adaptive-softmax-cutoff"
    if door == "transformers" and shown.task not in TEXTS:
        return f"{named}|--task {shown.task}"
    if door in ("safetensors", "step") and not issubclass(ours, LinearTimeLanguageModel):
        return named
    if door in ("step", "python_step") and "softmax" in re.sub(
        "adaptive.softmax", "", f"{shown.arch}{shown.arguments}"
    ):
        return "--arch, or --lineartime-layers"
    if door == "python_step" and name in ("adaptive input", "characters"):
        return "--adaptive-input|--character-embeddings"
    return ""


THROUGH = [(name, door) for name in SHOWN for door in DOORS if door != "step" or refusal(name, door) or name == TRACED]
THROUGH += [(name, door) for name in OPTIONS for door in (READERS if name in LANGUAGE else ("hub",))]
THROUGH += [("adaptive softmax", "transformers")]


@pytest.mark.parametrize(("trained", "door"), THROUGH, indirect=["trained"], scope="module")
def test_a_model_leaves_by_every_door(trained: Trained, door: str, request: pytest.FixtureRequest) -> None:
    named, leave = refusal(request.node.callspec.params["trained"], door), {**DOORS, **READERS}[door]
    if not named:
        leave(trained)
        return
    with pytest.raises((SystemExit, ValueError)) as refused:
        leave(trained)
    line = str(refused.value)
    assert re.search(named, line) and "allowed" in line and "\n" not in line


def test_documents_for_newcomers_are_read() -> None:
    places = {place.partition(":")[0] for shown in DOCUMENTS for place in shown.places}
    assert {"README.md", "fairseq_plugin/README.md", "recipes/guides/own_data.md", "recipes/demo"} <= places
