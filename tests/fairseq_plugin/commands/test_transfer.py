"""From a stock training to linear time by fairseq's commands: conversion, both stages, validation, evaluation."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.compare import weights
from tests.fairseq_plugin.helpers.commands import (
    NO_READER_THREAD,
    USER_DIR,
    run_in_turn,
    training_command,
)
from tests.fairseq_plugin.helpers.logs import entries, perplexity

PROGRAM = str(Path(__file__).parents[1] / "helpers" / "resumed_trainings.py")
KINDS = ("--lineartime-layers", "hedgehog,softmax")
TRANSFER = "--criterion attention_transfer --optimizer adam --lr 0.01 --no-epoch-checkpoints".split()
#: As in ``test_resumption.py``: eight updates that end in the third epoch.
RESUMED = "--tokens-per-sample 24 --max-tokens 480 --max-update 8 --update-freq 2 --update-epoch-batch-itr True".split()

EVALUATION = "--gen-subset valid --tokens-per-sample 48".split()


class Run(NamedTuple):
    """What the commands left behind and printed."""

    folder: Path
    outputs: dict[str, str]
    resumed: dict[str, dict]


@pytest.fixture(scope="module")
def run(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A teacher, its conversion, stage 1 stopped and resumed, stage 2, validation and evaluation, in one process."""
    folder = tmp_path_factory.mktemp("transfer")
    teacher, start = str(folder / "teacher" / "checkpoint_last.pt"), str(folder / "start.pt")

    def train(name: str, arch: str, *arguments: str) -> list[str]:
        command = training_command(data_bin, str(folder / name), arch, "--no-epoch-checkpoints", *arguments)
        return [*command, *NO_READER_THREAD]

    begun = (*KINDS, "--finetune-from-model", start, "--teacher", teacher)
    stage1 = train("transferred", "hybrid_lm", *begun, *TRANSFER, *RESUMED, "--disable-validation")
    (folder / "cases.json").write_text(json.dumps({"stage 1": stage1}))
    transferred = str(folder / "transferred" / "checkpoint_last.pt")
    begun = (*KINDS, "--finetune-from-model", transferred, "--teacher", teacher)
    overrides = "{'lineartime_layers': 'hedgehog,softmax'}"
    data = [data_bin, "--user-dir", USER_DIR, "--cpu", "--path"]
    commands = {
        "teacher": ("fairseq_cli.train", train("teacher", "transformer_lm", "--decoder-normalize-before"), ""),
        "convert": (
            "fairseq_plugin.convert",
            [teacher, start, "--arch", "hybrid_lm", "--model-overrides", overrides],
            "",
        ),
        "stage 1": (PROGRAM, [str(folder / "cases.json")], ""),
        "validate": (
            "fairseq_cli.validate",
            [*data, transferred, "--task", "language_modeling", "--batch-size", "8", "--log-format", "json"],
            "",
        ),
        "stage 2": ("fairseq_cli.train", train("student", "hybrid_lm", *begun, "--criterion", "distillation"), ""),
        "evaluate": ("fairseq_cli.eval_lm", [*data, str(folder / "student" / "checkpoint_best.pt"), *EVALUATION], ""),
    }
    outputs = dict(zip(commands, run_in_turn(*commands.values())))
    lines = [line.partition(" ")[2] for line in outputs["stage 1"].splitlines() if line.startswith("RESUMED ")]
    return Run(folder, outputs, json.loads(lines[0])["stage 1"])


def test_attention_transfer(run: Run) -> None:
    """It resumes as if it had never stopped, its loss falls, and the teacher's weights are still there, bit by bit."""
    assert len(run.resumed["whole"]) == 8 and run.resumed["resumed"] == run.resumed["whole"][5:]
    assert run.resumed["differs"] == [] and 1 < run.resumed["epochs"] < 2
    assert run.resumed["whole"][-1] < 0.8 * run.resumed["whole"][0]
    files = ("teacher/checkpoint_last.pt", "start.pt", "transferred/checkpoint_last.pt")
    teacher, start, transferred = (
        weights(torch.load(run.folder / file, weights_only=False)["model"]) for file in files
    )
    new = transferred.keys() - teacher.keys()
    assert new and all(".layers.0.self_attn.inner." in name for name in new)
    assert all(torch.equal(transferred[name], teacher[name]) for name in teacher if "version" not in name)
    assert all(not torch.equal(transferred[name], start[name]) for name in new)
    assert "its attention is another function of these weights" in run.outputs["convert"]
    (validated,) = entries(run.outputs["validate"], "valid")
    assert validated["valid_decoder_0"] == validated["valid_loss"] < run.resumed["whole"][0]


def test_distillation(run: Run) -> None:
    """All learns; what is logged is the student's own perplexity, and the best checkpoint is by it."""
    trained = entries(run.outputs["stage 2"], "train_inner")
    assert all(entry["teacher_kl"] > 0 and entry["ppl"] > 0 for entry in trained)
    assert entries(run.outputs["stage 2"], "valid")[-1].keys() >= {"valid_loss", "valid_ppl"}
    student = weights(torch.load(run.folder / "student" / "checkpoint_last.pt", weights_only=False)["model"])
    before = weights(torch.load(run.folder / "transferred" / "checkpoint_last.pt", weights_only=False)["model"])
    assert not torch.equal(student["decoder.layers.1.fc1.weight"], before["decoder.layers.1.fc1.weight"])
    assert perplexity(run.outputs["evaluate"]) == pytest.approx(
        entries(run.outputs["stage 2"], "valid")[-1]["valid_ppl"], rel=1e-3
    )
