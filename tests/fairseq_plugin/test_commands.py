"""Every fairseq command, as a user runs it: train, resume, validate, evaluate, generate, interact, load in Python."""

import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest
import torch
import yaml
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from tests.compare import assert_close

from .toy import ARCHITECTURES, CHECKOUT, SMALL, USER_DIR, run_module, training_command

PROMPTS = "w3 w21 w28\nw5\n"


def _entries(output: str, kind: str) -> List[Dict[str, float]]:
    """The numbers of fairseq's JSON log lines: ``train`` at the ends of epochs, ``train_inner``, ``valid``."""
    lines = re.findall(rf"\| {kind} \| (\{{.*\}})", output)
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


def _perplexity(output: str) -> float:
    return float(re.search(r"Perplexity: ([\d.]+)", output).group(1))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trained(request: pytest.FixtureRequest, data_bin: str, tmp_path_factory: pytest.TempPathFactory):
    """Architecture, checkpoint folder and log of a short training."""
    folder = str(tmp_path_factory.mktemp(request.param))
    return request.param, folder, run_module("fairseq_cli.train", training_command(data_bin, folder, request.param))


def test_training_learns(trained) -> None:
    """The loss falls within a few updates and is finite."""
    losses = [entry["loss"] for entry in _entries(trained[2], "train_inner")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1


def test_evaluation(trained, data_bin: str) -> None:
    """fairseq-eval-lm, with a context window too, and fairseq-validate agree with the training's own validation."""
    _, folder, log = trained
    checkpoint = str(Path(folder) / "checkpoint_best.pt")
    base = [data_bin, "--user-dir", USER_DIR, "--path", checkpoint, "--tokens-per-sample", "48", "--cpu"]
    plain = _perplexity(run_module("fairseq_cli.eval_lm", [*base, "--gen-subset", "valid"]))
    window = _perplexity(run_module("fairseq_cli.eval_lm", [*base, "--gen-subset", "valid", "--context-window", "40"]))
    validated = run_module(
        "fairseq_cli.validate",
        [data_bin, "--user-dir", USER_DIR, "--task", "language_modeling", "--path", checkpoint, "--cpu",
         "--valid-subset", "valid", "--max-tokens", "384", "--log-format", "json"],
    )  # fmt: skip
    expected = 2.0 ** _entries(log, "valid")[-1]["valid_loss"]
    assert math.isclose(plain, expected, rel_tol=0.01)
    assert math.isclose(2.0 ** _entries(validated, "valid")[-1]["valid_loss"], expected, rel_tol=0.01)
    assert math.isclose(window, plain, rel_tol=0.2)


def test_generation(trained, data_bin: str) -> None:
    """fairseq-generate and fairseq-interactive with beam search, batches of unequal prompts included."""
    _, folder, _ = trained
    base = [
        data_bin, "--user-dir", USER_DIR, "--task", "language_modeling", "--cpu", "--beam", "3",
        "--path", str(Path(folder) / "checkpoint_best.pt"),
    ]  # fmt: skip
    generated = run_module(
        "fairseq_cli.generate",
        [
            *base,
            "--sample-break-mode",
            "eos",
            "--prefix-size",
            "3",
            "--batch-size",
            "4",
            "--required-batch-size-multiple",
            "1",
        ],
    )
    hypotheses = re.findall(r"^H-\d+\t(\S+)\t(.*)$", generated, re.MULTILINE)
    assert len(hypotheses) == 20 and all(math.isfinite(float(score)) for score, _ in hypotheses)
    answered = run_module("fairseq_cli.interactive", [*base, "--buffer-size", "2", "--max-len-b", "9"], stdin=PROMPTS)
    answers = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", answered, re.MULTILINE))
    assert answers["0"].startswith("w3 w21 w28") and answers["1"].startswith("w5")


def test_loading_in_python(trained, data_bin: str) -> None:
    """``from_pretrained`` in a new process scores as the trained model does here, and samples text."""
    arch, folder, _ = trained
    names = {"linear_lm": "LinearLanguageModel", "softmax_lm": "SoftmaxLanguageModel"}
    script = f"""
import sys; sys.path.insert(0, {str(CHECKOUT)!r})
from fairseq_plugin import {names.get(arch, "FlowformerLanguageModel")} as Model
hub = Model.from_pretrained({folder!r}, "checkpoint_best.pt", data_name_or_path={data_bin!r}).eval()
print("SCORES", hub.score("w3 w21 w28 w5")["positional_scores"].tolist())
print("SAMPLE", hub.sample("w3 w21", beam=2, max_len_b=6))
"""
    (Path(folder) / "load.py").write_text(script)
    printed = run_module("load", [], cwd=folder)
    checkpoint = str(Path(folder) / "checkpoint_best.pt")
    (model,), _, task = load_model_ensemble_and_task([checkpoint], arg_overrides={"data": data_bin})
    sequence = task.source_dictionary.encode_line("w3 w21 w28 w5", add_if_not_exist=False).long()[None, :-1]
    with torch.no_grad():
        logits = model.eval()(torch.cat([torch.full((1, 1), task.source_dictionary.eos()), sequence], dim=1)[:, :-1])[0]
    expected = logits.log_softmax(-1).gather(-1, sequence[..., None])[0, :, 0]
    scores = torch.tensor(json.loads(re.search(r"SCORES (.*)", printed).group(1)))
    assert_close("scores", scores, expected[-len(scores) :], tolerance=1e-4)
    assert re.search(r"SAMPLE w3 w21", printed)


def test_resumed_training_is_the_same_training(data_bin: str, tmp_path: Path) -> None:
    """Three updates, then three more from the checkpoint in a new process, equal six at once."""
    whole = run_module("fairseq_cli.train", training_command(data_bin, str(tmp_path / "whole"), "flowformer_lm"))
    split = training_command(data_bin, str(tmp_path / "split"), "flowformer_lm")
    run_module("fairseq_cli.train", [*split, "--max-update", "3"])
    resumed = run_module("fairseq_cli.train", split)
    assert "Loaded checkpoint" in resumed
    assert [entry["loss"] for entry in _entries(whole, "train_inner")][3:] == [
        entry["loss"] for entry in _entries(resumed, "train_inner")
    ]
    states = [torch.load(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("whole", "split")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fp16", "--fp16-no-flatten-grads"],
        ["--memory-efficient-fp16"],
        ["--amp"],
        ["--checkpoint-activations", "--update-freq", "2"],
        ["--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40", "--ddp-backend", "legacy_ddp"],
    ],
    ids=lambda arguments: arguments[0].strip("-"),
)
def test_training_modes(arguments: List[str], data_bin: str, tmp_path: Path) -> None:
    """Precision, accumulation and criteria that fairseq allows, with a finite loss that falls."""
    command = training_command(data_bin, str(tmp_path), "flowformer_lm", "--max-update", "4", *arguments)
    losses = [entry["loss"] for entry in _entries(run_module("fairseq_cli.train", command), "train_inner")]
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]


def test_namespaces_in_a_checkpoint_load(data_bin: str, tmp_path: Path) -> None:
    """``--optimizer sgd`` has no dataclass: its checkpoint holds an argparse.Namespace, which torch >= 2.6 refuses."""
    options = ["--optimizer", "sgd", "--lr", "0.1", "--max-update", "2"]
    run_module("fairseq_cli.train", training_command(data_bin, str(tmp_path), "flowformer_lm", *options))
    evaluation = [data_bin, "--user-dir", USER_DIR, "--path", str(tmp_path / "checkpoint_last.pt"), "--cpu"]
    assert math.isfinite(_perplexity(run_module("fairseq_cli.eval_lm", [*evaluation, "--tokens-per-sample", "48"])))


def test_hydra_training(data_bin: str, tmp_path: Path) -> None:
    """fairseq-hydra-train from a YAML file with model._name and common.user_dir; its checkpoint evaluates."""
    sizes = {flag.strip("-").replace("-", "_"): int(value) for flag, value in zip(SMALL[::2], SMALL[1::2])}
    config = {
        "common": {"user_dir": USER_DIR, "cpu": True},
        "task": {"_name": "language_modeling", "data": data_bin, "tokens_per_sample": 48},
        "model": {"_name": "flowformer_lm", "flow_form": "paper", **sizes},
        "criterion": {"_name": "cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"max_tokens": 384},
        "optimization": {"max_update": 3, "lr": [0.003]},
        "checkpoint": {"save_dir": str(tmp_path / "out")},
        "hydra": {"run": {"dir": str(tmp_path / "run")}},
    }
    (tmp_path / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    run_module("fairseq_cli.hydra_train", ["--config-dir", str(tmp_path), "--config-name", "tiny"])
    checkpoint = tmp_path / "out" / "checkpoint_last.pt"
    assert torch.load(checkpoint)["cfg"]["model"]["flow_form"] == "paper"
    evaluation = [data_bin, "--user-dir", USER_DIR, "--path", str(checkpoint), "--tokens-per-sample", "48", "--cpu"]
    assert math.isfinite(_perplexity(run_module("fairseq_cli.eval_lm", evaluation)))


def test_two_processes_train_as_one(data_bin: str, tmp_path: Path) -> None:
    """Two gloo processes give the loss and the weights of one process with twice the --update-freq."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--dropout", "0", "--max-tokens", "192"]
    distributed = [
        "--distributed-no-spawn", "--distributed-world-size", "2", "--distributed-backend", "gloo",
        "--distributed-init-method", f"tcp://127.0.0.1:{port}", "--ddp-backend", "legacy_ddp",
    ]  # fmt: skip
    command = training_command(data_bin, str(tmp_path / "two"), "flowformer_lm", *common, *distributed)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "fairseq_cli.train", *command, "--distributed-rank", str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    two = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], two[0][-2000:]
    doubled = training_command(data_bin, str(tmp_path / "one"), "flowformer_lm", *common, "--update-freq", "2")
    one = run_module("fairseq_cli.train", doubled)
    losses = [[entry["loss"] for entry in _entries(output, "train_inner")] for output in (two[0], one)]
    assert losses[0] == losses[1]
    states = [torch.load(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("two", "one")]
    assert max((states[0][name] - states[1][name]).abs().max().item() for name in states[0]) < 1e-6
