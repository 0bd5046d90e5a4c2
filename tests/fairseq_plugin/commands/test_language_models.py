"""Every fairseq command, as a user runs it: train, resume, validate, evaluate, generate, interact, load in Python."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_MODEL_REGISTRY

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, run_module, training_command
from tests.fairseq_plugin.helpers.logs import entries, losses, perplexity
from tests.processes import CHECKOUT

PROMPTS = "w3 w21 w28\nw5\n"


def _evaluated_loss(output: str) -> float:
    """What fairseq-eval-lm says, in bits per token."""
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", output).group(1))


@torch.no_grad()
def _losses(checkpoint: str, data: str) -> tuple[float, float]:
    """Bits per token of the valid data, sample by sample: of all tokens, and without the one of --add-bos-token.

    fairseq-eval-lm leaves that token out; the validation of a training counts it.
    """
    (model,), _, task = load_model_ensemble_and_task([checkpoint], arg_overrides={"data": data})
    task.load_dataset("valid")
    every = []
    for sample in task.dataset("valid"):
        target = sample["target"][None]
        scores = model.eval().get_normalized_probs(model(sample["source"][None]), True, {"target": target})
        every.append(-scores.gather(-1, target[..., None])[0, :, 0].double() / math.log(2.0))
    added = int(task.args.add_bos_token)
    assert len(every) > 1 and all(len(bits) > 1 for bits in every)
    return torch.cat(every).mean().item(), torch.cat([bits[added:] for bits in every]).mean().item()


# Commands differ by what a layer and a configuration are, not by the attention inside of a layer: one of fairseq's own
# layer, a named size of gated attention units, whose checkpoint holds another kind of configuration, and one whose
# parameters limit the length. The last two train on samples of the greatest length with --add-bos-token, which makes
# each one token longer. What a command needs of a model is tested for every model in models/test_every_model.py.
TRAINED = ("flowformer_lm", "flash_lm_base", "daft_full_lm")
WITH_BOS = TRAINED[1:]
LOAD = """
import sys; sys.path.insert(0, {checkout!r})
from fairseq_plugin import {name} as Model
hub = Model.from_pretrained({folder!r}, "checkpoint_best.pt", data_name_or_path={data!r}).eval()
print("CLASS", type(hub.models[0]).__name__)
print("SCORES", hub.score("w3 w21 w28 w5")["positional_scores"].tolist())
print("SAMPLE", hub.sample("w3 w21", beam=2, max_len_b=6))
"""


class Trained(NamedTuple):
    """A short training and what every other command made of its checkpoint."""

    arch: str
    checkpoint: str
    outputs: dict[str, str]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request: pytest.FixtureRequest, data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The output of every command: train, eval-lm, eval-lm with a context window, validate, generate, interactive,
    and of ``from_pretrained`` in a script.
    """
    arch, folder = request.param, tmp_path_factory.mktemp(request.param)
    bos = ["--add-bos-token"] if arch in WITH_BOS else []
    checkpoint = str(folder / "checkpoint_best.pt")
    script = folder / "load.py"
    script.write_text(
        LOAD.format(checkout=str(CHECKOUT), name=ARCH_MODEL_REGISTRY[arch].__name__, folder=str(folder), data=data_bin)
    )
    base = [data_bin, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu"]
    evaluation = [*base, *bos, "--tokens-per-sample", "48", "--gen-subset", "valid"]
    task = [*base, *bos, "--task", "language_modeling"]
    lines = ["--sample-break-mode", "eos", "--prefix-size", "3", "--batch-size", "4", "--beam", "3"]
    commands = {
        "train": ("fairseq_cli.train", training_command(data_bin, str(folder), arch, *bos), ""),
        "eval": ("fairseq_cli.eval_lm", evaluation, ""),
        "window": ("fairseq_cli.eval_lm", [*evaluation, "--context-window", "40"], ""),
        "validate": ("fairseq_cli.validate", [*task, "--max-tokens", "384", "--log-format", "json"], ""),
        "generate": ("fairseq_cli.generate", [*task, *lines, "--required-batch-size-multiple", "1"], ""),
        "interactive": (
            "fairseq_cli.interactive",
            [*task, "--beam", "3", "--buffer-size", "2", "--max-len-b", "99"],
            PROMPTS,
        ),
        "load": (str(script), [], ""),
    }
    outputs = run_in_turn(*commands.values())
    return Trained(arch, checkpoint, dict(zip(commands, outputs)))


def test_training_learns(trained: Trained) -> None:
    """The loss falls within a few updates and is finite; gated attention units begin no worse than by guessing."""
    numbers = losses(trained.outputs["train"])
    assert len(numbers) == 6 and numbers[-1] < numbers[0] - 0.05


def test_evaluation(trained: Trained, data_bin: str) -> None:
    """fairseq-eval-lm, the training's own validation and fairseq-validate say what the checkpoint gives in Python."""
    every, without_bos = _losses(trained.checkpoint, data_bin)
    assert (every == without_bos) == (trained.arch not in WITH_BOS)
    for command in ("train", "validate"):
        assert math.isclose(entries(trained.outputs[command], "valid")[-1]["valid_loss"], every, abs_tol=1e-3)
    assert math.isclose(_evaluated_loss(trained.outputs["eval"]), without_bos, abs_tol=2e-4)
    # Another context is another loss, but after six updates not by much.
    assert math.isclose(perplexity(trained.outputs["window"]), 2.0**without_bos, rel_tol=0.2)


def test_generation(trained: Trained) -> None:
    """Beam search of fairseq-generate, and of fairseq-interactive with prompts of unequal length, up to the limit."""
    hypotheses = re.findall(r"^H-\d+\t(\S+)\t(.*)$", trained.outputs["generate"], re.MULTILINE)
    assert len(hypotheses) == 20 and all(math.isfinite(float(score)) for score, _ in hypotheses)
    answers = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", trained.outputs["interactive"], re.MULTILINE))
    assert answers["0"].startswith("w3 w21 w28") and answers["1"].startswith("w5")


def test_loading_in_python(trained: Trained, data_bin: str) -> None:
    """``from_pretrained`` in a new process gives the architecture's class, scores as here, and samples text."""
    printed = trained.outputs["load"]
    assert re.search(r"CLASS (\w+)", printed).group(1) == ARCH_MODEL_REGISTRY[trained.arch].__name__
    (model,), _, task = load_model_ensemble_and_task([trained.checkpoint], arg_overrides={"data": data_bin})
    sequence = task.source_dictionary.encode_line("w3 w21 w28 w5", add_if_not_exist=False).long()[None, :-1]
    with torch.no_grad():
        first = task.source_dictionary.bos() if task.args.add_bos_token else task.source_dictionary.eos()
        logits = model.eval()(torch.cat([torch.full((1, 1), first), sequence], dim=1)[:, :-1])[0]
    expected = logits.log_softmax(-1).gather(-1, sequence[..., None])[0, :, 0]
    scores = torch.tensor(json.loads(re.search(r"SCORES (.*)", printed).group(1)))
    assert_close("scores", scores, expected[-len(scores) :], tolerance=1e-4)
    assert re.search(r"SAMPLE w3 w21", printed)


#: Either kind of layer has some; flash_mlm has the others in test_masked_models.py, and every model half precision and
#: checkpointed activations, without a command, in models/test_every_model.py.
MODES = {
    "fp16": ["flash_lm", "--fp16", "--fp16-no-flatten-grads"],
    "memory-efficient-fp16": ["flowformer_lm", "--memory-efficient-fp16"],
    "amp": ["flowformer_lm", "--amp"],
    "checkpoint-activations": ["flash_lm", "--checkpoint-activations", "--update-freq", "2"],
    "adaptive-loss": ["flash_lm", *"--criterion adaptive_loss --adaptive-softmax-cutoff 20,40".split()]
    + ["--add-bos-token", "--ddp-backend", "legacy_ddp"],
}


@pytest.fixture(scope="module")
def trained_in_modes(data_bin: str, tmp_path_factory: pytest.TempPathFactory):
    """The logs of one training per mode, and the checkpoint of the one with adaptive loss."""
    folder = tmp_path_factory.mktemp("modes")
    commands = [
        training_command(data_bin, str(folder / mode), arch, "--max-update", "4", *arguments)
        for mode, (arch, *arguments) in MODES.items()
    ]
    checkpoint = str(folder / "adaptive-loss" / "checkpoint_last.pt")
    path = [data_bin, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu"]
    task = ["--task", "language_modeling", "--add-bos-token", "--tokens-per-sample", "48"]
    evaluation = ("fairseq_cli.eval_lm", [*path, *task, "--gen-subset", "valid"], "")
    # A whole line as the prefix ends in eos, after which fairseq's generation fails, for every architecture.
    lines = ["--sample-break-mode", "eos", "--prefix-size", "3", "--required-batch-size-multiple", "1"]
    lines += ["--max-tokens", "500"]
    generation = ("fairseq_cli.generate", [*path, *task, *lines], "")
    training = [("fairseq_cli.train", command, "") for command in commands]
    outputs = dict(zip([*MODES, "eval", "generate"], run_in_turn(*training, evaluation, generation)))
    return {**outputs, "checkpoint": checkpoint}


@pytest.mark.parametrize("mode", MODES)
def test_training_modes(trained_in_modes: dict[str, str], mode: str) -> None:
    """Precision, accumulation and criteria that fairseq allows, with a finite loss that falls."""
    numbers = losses(trained_in_modes[mode])
    assert len(numbers) == 4 and all(map(math.isfinite, numbers)) and numbers[-1] < numbers[0]


def test_adaptive_softmax_evaluates_and_generates(trained_in_modes: dict[str, str], data_bin: str) -> None:
    """Of a model that was trained with adaptive loss and --add-bos-token on samples of the greatest length."""
    every, without_bos = _losses(trained_in_modes["checkpoint"], data_bin)
    validated = entries(trained_in_modes["adaptive-loss"], "valid")[-1]["valid_loss"]
    # fairseq's criterion leaves out the second token of each rare cluster: its number there is that of padding.
    assert validated < every and math.isclose(validated, every, rel_tol=0.05)
    assert math.isclose(_evaluated_loss(trained_in_modes["eval"]), without_bos, abs_tol=2e-4)
    scores = re.findall(r"^H-\d+\t(\S+)\t", trained_in_modes["generate"], re.MULTILINE)
    assert len(scores) == 20 and all(math.isfinite(float(score)) for score in scores)


def test_namespaces_in_a_checkpoint_load(data_bin: str, tmp_path: Path) -> None:
    """``--optimizer sgd`` has no dataclass: its checkpoint holds an argparse.Namespace, which torch >= 2.6 refuses."""
    options = ["--optimizer", "sgd", "--lr", "0.1", "--max-update", "2"]
    run_module("fairseq_cli.train", training_command(data_bin, str(tmp_path), "flowformer_lm", *options))
    evaluation = [data_bin, "--user-dir", USER_DIR, "--path", str(tmp_path / "checkpoint_last.pt"), "--cpu"]
    assert math.isfinite(perplexity(run_module("fairseq_cli.eval_lm", [*evaluation, "--tokens-per-sample", "48"])))
