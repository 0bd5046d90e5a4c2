"""Helpers of the tests of masked models: toy models, a short training, labelled sentences."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import options, tasks
from torch import Tensor, nn

from .toy import USER_DIR, dictionary

GATED_ATTENTION_UNITS = ("flash_mlm", "flash_quad_mlm")
MASKED = (
    *GATED_ATTENTION_UNITS,
    "transformer_plus_mlm",
    "transformer_pp_mlm",
    "mc_transformer_pp_mlm",
    "performer_mlm",
    "combiner_mlm",
)
PAD = 1


def small(arch: str) -> list[str]:
    """Options that make ``arch`` small, with chunks and rows so short that toy sequences cross several."""
    command = "--encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64".split()
    if arch in GATED_ATTENTION_UNITS:
        command += ["--flash-query-dim", "16"]
    else:
        command += ["--encoder-attention-heads", "4"]
    if arch in ("flash_mlm", "mc_transformer_pp_mlm"):
        command += ["--flash-chunk-size", "16"]
    return [*command, "--flash-row-length", "8"] if arch == "combiner_mlm" else command


def build_masked(arch: str, *arguments: str, seed: int = 1, sizes: bool = True, words: int = 60):
    """The model that ``fairseq-train --task masked_lm --arch ARCH ARGUMENTS`` builds, small if ``sizes``."""
    command = ["data", "--task", "masked_lm", "--criterion", "masked_lm", "--arch", arch]
    command += [*(small(arch) if sizes else ()), "--tokens-per-sample", "128", *arguments]
    configuration = options.parse_args_and_arch(options.get_training_parser(), command)
    symbols = dictionary(words)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    torch.manual_seed(seed)
    return tasks.FairseqTask.build_model(task, configuration)


def randomised(model: nn.Module, std: float = 0.5, seed: int = 2) -> nn.Module:
    """``model`` with every parameter N(0, std): as initialised, attention adds too little to any output to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def build_random(arch: str, *arguments: str):
    """A small model in evaluation mode, in float64, whose attention shows in its features."""
    return randomised(build_masked(arch, *arguments).double()).eval()


def features(model, sequence: Tensor) -> Tensor:
    """Features (B, T, C) of sequence (B, T)."""
    return model(sequence, features_only=True)[0]


def padded(sequence: Tensor, left: int, right: int) -> Tensor:
    """sequence (B, T) -> (B, left + T + right), with padding around it."""
    return nn.functional.pad(sequence, (left, right), value=PAD)


def masked_training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train --task masked_lm`` on the CPU; later ``arguments`` win."""
    return [
        data,
        "--user-dir",
        USER_DIR,
        "--task",
        "masked_lm",
        "--criterion",
        "masked_lm",
        "--arch",
        arch,
        *small(arch),
        "--dropout",
        "0.1",
        "--tokens-per-sample",
        "48",
        "--max-tokens",
        "384",
        "--optimizer",
        "adam",
        "--lr",
        "3e-3",
        "--max-update",
        "6",
        "--save-dir",
        save_dir,
        "--log-format",
        "json",
        "--log-interval",
        "1",
        "--cpu",
        "--seed",
        "1",
        "--num-workers",
        "0",
        *arguments,
    ]


def entries(output: str, kind: str) -> list[dict[str, float]]:
    """The numbers of fairseq's JSON log lines: ``train`` at the ends of epochs, ``train_inner``, ``valid``."""
    # "| INFO | valid | {...}" by itself, "INFO:valid:{...}" behind another command in one process.
    lines = re.findall(rf"(?:\| |:){kind}(?: \| |:)(\{{.*\}})", output)
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


def losses(output: str) -> list[float]:
    """The training loss of every update."""
    return [entry["loss"] for entry in entries(output, "train_inner")]


def write_labelled_text(folder: Path, seed: int = 0) -> None:
    """{train,valid}.{input0,label}: the label is whether most words of a sentence are of the first half."""
    rng = random.Random(seed)
    for split, lines in (("train", 400), ("valid", 80)):
        sentences, labels = [], []
        for _ in range(lines):
            label = rng.randrange(2)
            words = [rng.randrange(30) + 30 * (label if rng.random() < 0.9 else 1 - label) for _ in range(15)]
            sentences.append(" ".join(f"w{word}" for word in words[: rng.randrange(11, 16)]))
            labels.append(str(label))
        (folder / f"{split}.input0").write_text("\n".join(sentences) + "\n")
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")
