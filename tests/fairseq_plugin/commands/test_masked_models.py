"""Masked models by fairseq's commands: train, validate, precision, hydra, loading in Python."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import sentencepiece
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.commands import (
    USER_DIR,
    masked_training_command,
    run_in_turn,
    run_module,
)
from tests.fairseq_plugin.helpers.logs import entries, losses
from tests.fairseq_plugin.helpers.masked_models import build_masked, features
from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT

#: One of gated attention units, one of fairseq's own layer; for the others see models/test_every_model.py.
TRAINED = ("flash_mlm", "transformer_pp_mlm")
SENTENCE = [0, 5, 6, 7, 64, 9, 10, 2]  # <s>, words, <mask>, words, </s>

LOAD = f"""
import sys; sys.path.insert(0, {str(CHECKOUT)!r})
import json, torch, fairseq_plugin
for name, folder, data in json.loads(sys.argv[1]):
    hub = getattr(fairseq_plugin, name).from_pretrained(folder, "checkpoint_last.pt", data_name_or_path=data).eval()
    with torch.no_grad():
        features = hub.extract_features(torch.tensor({SENTENCE}))
    print("LOADED", type(hub).__name__, type(hub.model).__name__, json.dumps(features.tolist()))
"""


class Trained(NamedTuple):
    """A short training of each architecture: its log, what fairseq-validate says, and what a new process loads."""

    folders: dict[str, Path]
    training: dict[str, str]
    validation: dict[str, str]
    loaded: dict[str, list[str]]


@pytest.fixture(scope="module")
def trained(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One process trains and validates, another one loads."""
    root = tmp_path_factory.mktemp("masked")
    folders = {arch: root / arch for arch in TRAINED}
    training, validation = [], []
    for arch, folder in folders.items():
        command = masked_training_command(data_bin, str(folder), arch, "--max-update", "8")
        training.append(("fairseq_cli.train", command, ""))
        validation.append(("fairseq_cli.validate", _validate(data_bin, folder), ""))
    outputs = run_in_turn(*training, *validation)
    (root / "load.py").write_text(LOAD)
    loading = [(ARCH_MODEL_REGISTRY[arch].__name__, str(folder), data_bin) for arch, folder in folders.items()]
    lines = re.findall("LOADED (.*)", run_module("load", [json.dumps(loading)], cwd=str(root)))
    return Trained(
        folders,
        dict(zip(TRAINED, outputs)),
        dict(zip(TRAINED, outputs[len(TRAINED) :])),
        {arch: line.split(" ", 2) for arch, line in zip(TRAINED, lines)},
    )


def _validate(data: str, folder: Path, *arguments: str) -> list[str]:
    options = "--task masked_lm --cpu --valid-subset valid --max-tokens 384 --log-format json".split()
    return [data, "--user-dir", USER_DIR, "--path", str(folder / "checkpoint_last.pt"), *options, *arguments]


@pytest.mark.parametrize("arch", TRAINED)
def test_training_learns(trained: Trained, arch: str) -> None:
    """The loss falls within a few updates."""
    numbers = losses(trained.training[arch])
    assert len(numbers) == 8 and numbers[-1] < numbers[0] - 0.08


@pytest.mark.parametrize("arch", TRAINED)
def test_validation(trained: Trained, arch: str) -> None:
    """fairseq-validate finds the loss that the training's own validation found last."""
    last = entries(trained.training[arch], "valid")[-1]["valid_loss"]
    validated = entries(trained.validation[arch], "valid")
    assert len(validated) == 1 and math.isclose(validated[0]["valid_loss"], last, abs_tol=2e-3)


@pytest.mark.parametrize("arch", TRAINED)
def test_loading_in_python(trained: Trained, arch: str) -> None:
    """``from_pretrained`` in a new process: fairseq's interface, the right class, the stored weights' features."""
    interface, model_class, printed = trained.loaded[arch]
    assert (interface, model_class) == ("RobertaHubInterface", ARCH_MODEL_REGISTRY[arch].__name__)
    model = build_masked(arch, "--tokens-per-sample", "48", words=61).eval()
    model.load_state_dict(torch.load(trained.folders[arch] / "checkpoint_last.pt")["model"])
    with torch.no_grad():
        assert_close("features", torch.tensor(json.loads(printed)), features(model, torch.tensor([SENTENCE])))


def test_checkpoints_hold_a_namespace(trained: Trained) -> None:
    """Which torch >= 2.6 would refuse without the plugin's list of harmless classes."""
    stored = torch.load(trained.folders["flash_mlm"] / "checkpoint_last.pt", weights_only=True)
    assert isinstance(stored["cfg"]["model"], argparse.Namespace)
    # An option that nobody set is not stored: a checkpoint follows the default of the code that loads it.
    assert not hasattr(stored["cfg"]["model"], "flash_kernel")


MODES = {
    "fp16": ["--fp16", "--fp16-no-flatten-grads"],
    "memory-efficient fp16": ["--memory-efficient-fp16"],
    "amp": ["--amp"],
    "checkpointed and accumulated": ["--checkpoint-activations", "--update-freq", "2", "--max-tokens", "192"],
    "noise": ["--encoder-layerdrop", "0.2", "--quant-noise-pq", "0.1", "--attention-dropout", "0.1"],
    "whole sentences": ["--sample-break-mode", "complete", "--untie-weights-roberta"],
}


@pytest.fixture(scope="module")
def modes(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The logs of trainings of ``flash_mlm``, all in one process; "plain" has none of the options."""
    root = tmp_path_factory.mktemp("modes")
    commands = [
        ("fairseq_cli.train", masked_training_command(data_bin, str(root / name), "flash_mlm", *arguments), "")
        for name, arguments in {"plain": [], **MODES}.items()
    ]
    return dict(zip(["plain", *MODES], run_in_turn(*commands)))


@pytest.mark.parametrize("mode", MODES)
def test_training_modes(modes: dict[str, str], mode: str) -> None:
    """Precision, accumulation and noise that fairseq allows: a loss that falls; half precision follows single."""
    numbers = losses(modes[mode])
    assert len(numbers) == 6 and numbers[-1] < numbers[0]
    if "fp16" in mode:
        assert '"loss_scale": "128"' in modes[mode] and '"loss_scale"' not in modes["plain"]
    if mode in ("fp16", "memory-efficient fp16", "amp"):
        assert max(abs(a - b) for a, b in zip(numbers, losses(modes["plain"]))) < 0.02
    else:
        assert numbers != losses(modes["plain"])


FILL = f"""
import sys; sys.path.insert(0, {str(CHECKOUT)!r})
from fairseq_plugin import FlashMaskedModel
folder, data = sys.argv[1:]
# fairseq finds the file sentencepiece.bpe.model beside the checkpoint.
hub = FlashMaskedModel.from_pretrained(folder, "checkpoint_last.pt", data_name_or_path=data, bpe="sentencepiece").eval()
print("DECODED", hub.decode(hub.encode("w3 w21")))
for text, probability, word in hub.fill_mask("w3 w21 <mask> w5", topk=5):
    print("FILLED", probability, "|", text)
"""


def test_fill_mask(tmp_path: Path) -> None:
    """RoBERTa's fill_mask, with the sentencepiece model that lies beside the checkpoint."""
    write_text(tmp_path)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "train.txt"),
        model_prefix=str(folder / "sentencepiece.bpe"),
        vocab_size=60,
        minloglevel=2,
    )
    encoder = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    for split in ("train", "valid"):
        pieces = encoder.encode((tmp_path / f"{split}.txt").read_text().splitlines(), out_type=str)
        (tmp_path / f"{split}.pieces").write_text("\n".join(" ".join(line) for line in pieces) + "\n")
    data = str(tmp_path / "bin")
    splits = [f"--{split}pref={tmp_path / split}.pieces" for split in ("train", "valid")]
    (tmp_path / "fill.py").write_text(FILL)
    *_, printed = run_in_turn(
        ("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", data, "--workers", "1"], ""),
        ("fairseq_cli.train", masked_training_command(data, str(folder), "flash_mlm"), ""),
        (str(tmp_path / "fill.py"), [str(folder), data], ""),
    )
    assert re.search("DECODED w3 w21$", printed, re.MULTILINE)
    filled = re.findall(r"FILLED (\S+) \| (.*)", printed)
    probabilities = [float(probability) for probability, _ in filled]
    # fairseq leaves out symbols that are not words.
    assert 2 <= len(filled) <= 5 and 1.0 > probabilities[0] and probabilities == sorted(probabilities, reverse=True)
    assert all(text.startswith("w3 w21") and text.endswith("w5") and "<mask>" not in text for _, text in filled)
