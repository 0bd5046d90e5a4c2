"""From a stock training to linear time by fairseq's commands: conversion, both stages, fine-tuning, evaluation."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.fairseq_plugin.helpers import masked_models
from tests.fairseq_plugin.helpers.commands import (
    NO_READER_THREAD,
    USER_DIR,
    NamedRuns,
    masked_training_command,
    run_named,
    training_command,
)
from tests.fairseq_plugin.helpers.logs import entries, perplexity
from tests.fairseq_plugin.helpers.text import write_labelled_text

PROGRAM = str(Path(__file__).parents[1] / "helpers" / "resumed_trainings.py")
TRANSFER = "--criterion attention_transfer --optimizer adam --lr 0.01 --no-epoch-checkpoints".split()
#: As in ``test_resumption.py``: eight updates that end in the third epoch.
RESUMED = "--tokens-per-sample 24 --max-tokens 480 --max-update 8 --update-freq 2 --update-epoch-batch-itr True".split()
#: Positions of masked models, in pretraining and in fine-tuning.
LIMIT = ("--max-positions", "48")
_LABELS = (
    "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 --batch-size 16 --cpu "
    "--log-format json"
).split()
#: fairseq's GLUE recipe, for a toy.
_SHORT = (
    "--reset-optimizer --reset-dataloader --reset-meters --separator-token 2 --required-batch-size-multiple 1 "
    "--optimizer adam --lr 2e-3 --max-epoch 3 --best-checkpoint-metric accuracy "
    "--maximize-best-checkpoint-metric --no-epoch-checkpoints --log-interval 1 --seed 1 --num-workers 0"
).split()
#: Where RoBERTa has its norms and positions, for a student, and the student's attentions.
ROBERTA = (
    "--lineartime-post-norm --layernorm-embedding --encoder-learned-pos --lineartime-layers linear,lolcats".split()
)
#: The tweaks of the paper's Table 4, with smaller chunks than in pretraining.
TWEAKS = ("flash_mlm", "--flash-first-softmax", "--flash-first-to-all", "--flash-chunk-size", "8")

pytestmark = pytest.mark.usefixtures("plain_pytorch")


@pytest.fixture(scope="module")
def language(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """A teacher, its conversion, stage 1 stopped and resumed, stage 2, validation and evaluation, in one process."""
    folder = tmp_path_factory.mktemp("transfer")
    teacher, transferred = (str(folder / x / "checkpoint_last.pt") for x in ("teacher", "transferred"))
    kinds, start = ("--lineartime-layers", "hedgehog,softmax"), str(folder / "start.pt")

    def train(name: str, arch: str, *arguments: str) -> list[str]:
        command = training_command(data_bin, str(folder / name), arch, "--no-epoch-checkpoints", *arguments)
        return [*command, *NO_READER_THREAD]

    begun = (*kinds, "--finetune-from-model", start, "--teacher", teacher)
    stage1 = train("transferred", "hybrid_lm", *begun, *TRANSFER, *RESUMED, "--disable-validation")
    (folder / "cases.json").write_text(json.dumps({"stage 1": stage1}))
    begun = (*kinds, "--finetune-from-model", transferred, "--teacher", teacher)
    convert = [teacher, start, "--arch", "hybrid_lm", "--model-overrides", str({"lineartime_layers": kinds[1]})]
    data = [data_bin, "--user-dir", USER_DIR, "--cpu", "--path"]
    validate = [*data, transferred, "--task", "language_modeling", "--batch-size", "8", "--log-format", "json"]
    evaluate = [*data, f"{folder}/student/checkpoint_best.pt", "--gen-subset", "valid", "--tokens-per-sample", "48"]
    commands = {
        "teacher": ("fairseq_cli.train", train("teacher", "transformer_lm", "--decoder-normalize-before"), ""),
        "convert": ("fairseq_plugin.convert", convert, ""),
        "stage 1": (PROGRAM, [str(folder / "cases.json")], ""),
        "validate": ("fairseq_cli.validate", validate, ""),
        "stage 2": ("fairseq_cli.train", train("student", "hybrid_lm", *begun, "--criterion", "distillation"), ""),
        "evaluate": ("fairseq_cli.eval_lm", evaluate, ""),
    }
    return run_named(folder, commands)


def test_attention_transfer(language: NamedRuns) -> None:
    """Training resumes as if it had never stopped, the loss falls, and the teacher's weights stay, bit by bit."""
    line = next(x for x in language.outputs["stage 1"].splitlines() if x.startswith("RESUMED "))
    resumed = json.loads(line.partition(" ")[2])["stage 1"]
    assert len(resumed["whole"]) == 8 and resumed["resumed"] == resumed["whole"][5:]
    assert resumed["differs"] == [] and 1 < resumed["epochs"] < 2
    assert resumed["whole"][-1] < 0.8 * resumed["whole"][0]
    teacher, start, transferred = (language.weights(name) for name in ("teacher", "start.pt", "transferred"))
    new = transferred.keys() - teacher.keys()
    assert new and all(".layers.0.self_attn.inner." in name for name in new)
    assert all(torch.equal(transferred[name], x) for name, x in teacher.items())
    assert all(not torch.equal(transferred[name], start[name]) for name in new)
    assert "its attention is another function of these weights" in language.outputs["convert"]
    (validated,) = entries(language.outputs["validate"], "valid")
    assert validated["valid_decoder_0"] == validated["valid_loss"] < resumed["whole"][0]


def test_distillation(language: NamedRuns) -> None:
    """All learns; what is logged is the student's own perplexity, and the best checkpoint is by it."""
    trained, validated = (entries(language.outputs["stage 2"], kind) for kind in ("train_inner", "valid"))
    assert all(entry["teacher_kl"] > 0 and entry["ppl"] > 0 for entry in trained)
    name = "decoder.layers.1.fc1.weight"
    assert not torch.equal(language.weights("student")[name], language.weights("transferred")[name])
    assert perplexity(language.outputs["evaluate"]) == pytest.approx(validated[-1]["valid_ppl"], rel=1e-3)


@pytest.fixture(scope="module")
def masked(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """RoBERTa, its conversion and both stages; ours; and fine-tuning of both on labelled sentences, in one process."""
    folder = tmp_path_factory.mktemp("transfer_masked")
    text, teacher = folder / "text", str(folder / "teacher" / "checkpoint_last.pt")
    text.mkdir()
    write_labelled_text(text)
    commands: dict[str, tuple[str, Sequence[str], str]] = {}
    for kind, dictionary in (("input0", ("--srcdict", f"{data_bin}/dict.txt")), ("label", ())):
        splits = [f"--{split}pref={text / split}.{kind}" for split in ("train", "valid")]
        made = ["--only-source", *splits, "--destdir", str(text / "bin" / kind), "--workers", "1", *dictionary]
        commands[kind] = ("fairseq_cli.preprocess", made, "")
    labels = [str(text / "bin"), "--user-dir", USER_DIR, *_LABELS]

    def train(name: str, arch: str, *arguments: str) -> None:
        command = masked_training_command(data_bin, str(folder / name), arch, *LIMIT, *arguments)
        commands[name] = ("fairseq_cli.train", [*command, "--no-epoch-checkpoints"], "")

    def fine_tune(pretrained: str, name: str, arch: str, *arguments: str) -> None:
        model = ["--arch", arch, *masked_models.small(arch), *LIMIT, "--save-dir", str(folder / name)]
        restored = ["--restore-file", str(folder / pretrained / "checkpoint_last.pt")]
        commands[name] = ("fairseq_cli.train", [*labels, *model, *restored, *_SHORT, *arguments], "")
        path = ["--path", str(folder / name / "checkpoint_last.pt")]
        commands[f"{name} valid"] = ("fairseq_cli.validate", [*labels, *path], "")

    train("teacher", "roberta")
    start, overrides = str(folder / "start.pt"), str({"lineartime_layers": ROBERTA[-1]})
    convert = [teacher, start, "--arch", "hybrid_mlm", "--model-overrides", overrides]
    commands["convert"] = ("fairseq_plugin.convert", convert, "")
    for name, criterion, learning in (
        ("stage 1", "attention_transfer", "attention"),
        ("stage 2", "distillation", "all"),
    ):
        learned = ["--teacher", teacher, "--lineartime-trained-parameters", learning]
        train(name, "hybrid_mlm", *ROBERTA, "--finetune-from-model", start, "--criterion", criterion, *learned)
        start = str(folder / name / "checkpoint_last.pt")
    fine_tune("stage 2", "stage 2 fine", "hybrid_mlm", *ROBERTA)
    train("units", "flash_mlm", "--max-update", "8")
    fine_tune("units", "units fine", *TWEAKS)
    return run_named(folder, commands)


@pytest.mark.parametrize("name", ["stage 2", "units"])
def test_fine_tuning_learns_the_labels(masked: NamedRuns, name: str) -> None:
    """From chance to nearly all of the held-out sentences; fairseq-validate finds what the training found last."""
    log = masked.outputs[f"{name} fine"]
    assert "Loaded checkpoint" in log and entries(log, "train_inner")[0]["accuracy"] < 85.0
    (validated,), last = entries(masked.outputs[f"{name} fine valid"], "valid"), entries(log, "valid")[-1]
    assert validated["valid_accuracy"] == last["valid_accuracy"] >= 95.0
    assert abs(validated["valid_loss"] - last["valid_loss"]) < 2e-3
    # Of biases by distance, the distances of the smaller chunk are read in both layers.
    assert log.count("a relative bias for 16 tokens is read for 8") == (2 if name == "units" else 0)


def test_stages_of_a_masked_model(masked: NamedRuns) -> None:
    """An attention alone learns in stage 1, and everything in stage 2."""
    one, two, teacher = (masked.weights(name) for name in ("stage 1", "stage 2", "teacher"))
    changed = {name for name, x in teacher.items() if not torch.equal(one[name], x)}
    assert changed and all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for name in changed)
    assert any(".inner." in name for name in one.keys() - teacher.keys())
    assert not torch.equal(one["encoder.lm_head.dense.weight"], two["encoder.lm_head.dense.weight"])
