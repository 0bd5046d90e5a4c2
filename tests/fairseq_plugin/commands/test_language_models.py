"""Every fairseq command, as a user runs it: train, resume, validate, evaluate, generate, interact, load in Python."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, training_command
from tests.fairseq_plugin.helpers.logs import entries, losses, perplexity

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
# layer, and a named size of gated attention units, whose checkpoint holds another kind of configuration; it trains on
# samples of the greatest length with --add-bos-token, which makes each one token longer. Loading in Python is in
# test_every_option.py, and what a command needs of a model, for every model, in models/test_contract.py.
TRAINED = ("flowformer_lm", "flash_lm_base")
WITH_BOS = TRAINED[1:]


class Trained(NamedTuple):
    """A short training and what every other command made of its checkpoint."""

    arch: str
    checkpoint: str
    outputs: dict[str, str]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request: pytest.FixtureRequest, data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The output of every command: train, eval-lm, eval-lm with a context window, validate, generate, interactive."""
    arch, folder = request.param, tmp_path_factory.mktemp(request.param)
    bos = ["--add-bos-token"] if arch in WITH_BOS else []
    checkpoint = str(folder / "checkpoint_best.pt")
    base = [data_bin, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu"]
    evaluation = [*base, *bos, "--tokens-per-sample", "48", "--gen-subset", "valid"]
    task = [*base, *bos, "--task", "language_modeling"]
    lines = ["--sample-break-mode", "eos", "--prefix-size", "3", "--batch-size", "4"]
    validate = ["--valid-subset", "valid", "--max-tokens", "384", "--log-format", "json"]
    generate = ["--beam", "3", *lines, "--required-batch-size-multiple", "1"]
    interactive = ["--beam", "3", "--buffer-size", "2", "--max-len-b", "99"]
    commands = {
        "train": ("fairseq_cli.train", training_command(data_bin, str(folder), arch, *bos), ""),
        "eval": ("fairseq_cli.eval_lm", evaluation, ""),
        "window": ("fairseq_cli.eval_lm", [*evaluation, "--context-window", "40"], ""),
        "validate": ("fairseq_cli.validate", [*task, *validate], ""),
        "generate": ("fairseq_cli.generate", [*task, *generate], ""),
        "interactive": ("fairseq_cli.interactive", [*task, *interactive], PROMPTS),
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


def test_adaptive_softmax_trains_evaluates_and_generates(data_bin: str, tmp_path: Path) -> None:
    """With --add-bos-token on samples of the greatest length.

    Precision and accumulation are in test_masked_models.py, and for every model in models/test_contract.py.
    """
    adaptive = "--criterion adaptive_loss --adaptive-softmax-cutoff 20,40 --add-bos-token --ddp-backend legacy_ddp"
    training = training_command(data_bin, str(tmp_path), "flash_lm", "--max-update", "4", *adaptive.split())
    checkpoint = str(tmp_path / "checkpoint_last.pt")
    path = [data_bin, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu"]
    task = ["--task", "language_modeling", "--add-bos-token", "--tokens-per-sample", "48"]
    # A whole line as the prefix ends in eos, after which fairseq's generation fails, for every architecture.
    lines = "--sample-break-mode eos --prefix-size 3 --required-batch-size-multiple 1 --max-tokens 500".split()
    trained, evaluated, generated = run_in_turn(
        ("fairseq_cli.train", training, ""),
        ("fairseq_cli.eval_lm", [*path, *task, "--gen-subset", "valid"], ""),
        ("fairseq_cli.generate", [*path, *task, *lines], ""),
    )
    numbers = losses(trained)
    assert len(numbers) == 4 and numbers[-1] < numbers[0]
    every, without_bos = _losses(checkpoint, data_bin)
    validated = entries(trained, "valid")[-1]["valid_loss"]
    # fairseq's criterion leaves out the second token of each rare cluster: its number there is that of padding.
    assert validated < every and math.isclose(validated, every, rel_tol=0.05)
    assert math.isclose(_evaluated_loss(evaluated), without_bos, abs_tol=2e-4)
    scores = re.findall(r"^H-\d+\t(\S+)\t", generated, re.MULTILINE)
    assert len(scores) == 20 and all(math.isfinite(float(score)) for score in scores)
