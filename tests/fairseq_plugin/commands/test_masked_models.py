"""Masked models by fairseq's commands: train, validate, precision, loading in Python."""

import argparse
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import sentencepiece
import torch

from fairseq_plugin import FlashMaskedModel
from tests.fairseq_plugin.helpers.commands import USER_DIR, masked_training_command, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries, losses
from tests.fairseq_plugin.helpers.text import write_text

#: One of gated attention units, one of fairseq's own layer; for the others see models/test_contract.py.
TRAINED = ("flash_mlm", "transformer_pp_mlm")
#: Options of ``flash_mlm``; with checkpointed activations models/test_contract.py compares gradients.
MODES = {
    "fp16": ["--fp16", "--fp16-no-flatten-grads"],
    "memory-efficient fp16": ["--memory-efficient-fp16"],
    "amp": ["--amp"],
    "noise": "--encoder-layerdrop 0.2 --quant-noise-pq 0.1 --attention-dropout 0.1 --checkpoint-activations".split(),
    "whole sentences": "--sample-break-mode complete --untie-weights-roberta --update-freq 2 --max-tokens 192".split(),
}


class Trained(NamedTuple):
    """Folders of short trainings by architecture, and what commands printed by architecture or mode."""

    folders: dict[str, Path]
    training: dict[str, str]
    validation: dict[str, str]


@pytest.fixture(scope="module")
def trained(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All trainings and validations, in one process; ``flash_mlm`` without any option of MODES too."""
    root = tmp_path_factory.mktemp("masked")
    folders = {arch: root / arch for arch in TRAINED}
    runs = {arch: (arch,) for arch in TRAINED} | {mode: ("flash_mlm", *options) for mode, options in MODES.items()}
    training = {
        name: ("fairseq_cli.train", masked_training_command(data_bin, str(root / name), *arguments), "")
        for name, arguments in runs.items()
    }
    validate = [data_bin, "--user-dir", USER_DIR, "--task", "masked_lm", "--cpu", "--valid-subset", "valid"]
    validate += ["--max-tokens", "384", "--log-format", "json", "--path"]
    validation = [
        ("fairseq_cli.validate", [*validate, str(folder / "checkpoint_last.pt")], "") for folder in folders.values()
    ]
    outputs = run_in_turn(*training.values(), *validation)
    return Trained(folders, dict(zip(training, outputs)), dict(zip(TRAINED, outputs[len(training) :])))


@pytest.mark.parametrize("arch", TRAINED)
def test_training_and_validation(trained: Trained, arch: str) -> None:
    """The loss falls, and fairseq-validate finds the loss that the training's own validation found last."""
    numbers = losses(trained.training[arch])
    assert len(numbers) == 6 and numbers[-1] < numbers[0] - 0.05
    last = entries(trained.training[arch], "valid")[-1]["valid_loss"]
    (validated,) = entries(trained.validation[arch], "valid")
    assert math.isclose(validated["valid_loss"], last, abs_tol=2e-3)


def test_checkpoints_hold_a_namespace(trained: Trained) -> None:
    """Which torch >= 2.6 would refuse without the plugin's list of harmless classes."""
    stored = torch.load(trained.folders["flash_mlm"] / "checkpoint_last.pt", weights_only=True)
    assert isinstance(stored["cfg"]["model"], argparse.Namespace)
    # An option that nobody set is not stored: a checkpoint follows the default of the code that loads it.
    assert not hasattr(stored["cfg"]["model"], "flash_kernel")


@pytest.mark.parametrize("mode", MODES)
def test_training_modes(trained: Trained, mode: str) -> None:
    """Precision, accumulation and noise that fairseq allows: a loss that falls; half precision follows single."""
    numbers, plain = losses(trained.training[mode]), losses(trained.training["flash_mlm"])
    assert len(numbers) == 6 and numbers[-1] < numbers[0]
    assert ('"loss_scale": "128"' in trained.training[mode]) == ("fp16" in mode)
    if mode in ("fp16", "memory-efficient fp16", "amp"):
        assert max(abs(a - b) for a, b in zip(numbers, plain)) < 0.02
    else:
        assert numbers != plain


def test_fill_mask(tmp_path: Path) -> None:
    """RoBERTa's fill_mask, with the sentencepiece model that lies beside the checkpoint, where fairseq finds it."""
    write_text(tmp_path)
    folder, data = tmp_path / "checkpoints", str(tmp_path / "bin")
    folder.mkdir()
    prefix = str(folder / "sentencepiece.bpe")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "train.txt"), model_prefix=prefix, vocab_size=60, minloglevel=2
    )
    encoder = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    for split in ("train", "valid"):
        pieces = encoder.encode((tmp_path / f"{split}.txt").read_text().splitlines(), out_type=str)
        (tmp_path / f"{split}.pieces").write_text("\n".join(" ".join(line) for line in pieces) + "\n")
    splits = [f"--{split}pref={tmp_path / split}.pieces" for split in ("train", "valid")]
    run_in_turn(
        ("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", data, "--workers", "1"], ""),
        ("fairseq_cli.train", masked_training_command(data, str(folder), "flash_mlm"), ""),
    )
    options = {"data_name_or_path": data, "bpe": "sentencepiece"}
    hub = FlashMaskedModel.from_pretrained(str(folder), "checkpoint_last.pt", **options).eval()
    assert hub.decode(hub.encode("w3 w21")) == "w3 w21"
    filled = hub.fill_mask("w3 w21 <mask> w5", topk=5)
    probabilities = [probability for _, probability, _ in filled]
    # fairseq leaves out symbols that are not words.
    assert 2 <= len(filled) <= 5 and 1.0 > probabilities[0] and probabilities == sorted(probabilities, reverse=True)
    assert all(re.fullmatch(r"w3 w21.*w5", text) and "<mask>" not in text for text, _, _ in filled)
