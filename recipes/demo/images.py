"""The image half of the demo: a hierarchical Flowformer learns handwritten digits with timm."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from common.files.output_files import new_folder

from ..shared.commands import Finished, python_command, run
from ..shared.digits import VALIDATION_DIGITS, write_digits
from .text import COMMAND, Budget

MODEL = "flowformer_hier_digits"
#: Accuracy on held-out digits, in percent, that a trained model must reach.
REQUIRED_TOP1 = 95.0
_EPOCH_STARTS = re.compile(r"^Train: (\d+)\b")


class Epoch(NamedTuple):
    """One line of timm's summary.csv; losses in nats per image, top1 in percent."""

    epoch: int
    train_loss: float
    valid_loss: float
    top1: float


class Maps(NamedTuple):
    """Flow-Attention's weights for a few digits, as arrays (digit, height, width)."""

    labels: list[int]
    predictions: list[int]
    images: np.ndarray  # 0..1
    competition: np.ndarray
    allocation: np.ndarray
    layer: str


class ImageResult(NamedTuple):
    """All results of the image half."""

    parameters: int
    digits: dict[str, int]  # split -> number of images
    epochs: list[Epoch]
    training: Finished
    trainer: str  # description of the training script: timm's train.py, or this package's loop
    top1: float  # after the last epoch, since the held-out digits must not select the checkpoint
    maps: Maps


def check_scripts(timm_scripts: Path | None) -> None:
    """Raise ValueError unless ``timm_scripts`` is None or a folder with train.py."""
    if timm_scripts is not None and not (timm_scripts / "train.py").is_file():
        raise ValueError(f"--timm-scripts is {timm_scripts}; allowed: a folder that holds timm's train.py")


def run_images(out: Path, budget: Budget, timm_scripts: Path | None = None) -> ImageResult:
    """Run the image half in the folder ``out``, with the train.py in ``timm_scripts`` unless that is None."""
    print("Images: scikit-learn's handwritten digits", flush=True)
    folder = out / "images" / "digits"
    with new_folder(folder, COMMAND) as unfinished:
        digits = write_digits(unfinished)
    print(f"  {digits['train']} digits to learn from, {digits['validation']} held out")
    trainer = ["-m", "recipes.demo.train_digits"]
    if timm_scripts is not None:
        trainer = ["-m", "timm_plugin", timm_scripts / "train.py"]
    with (
        tqdm(total=budget.epochs, desc=f"  {MODEL}", unit=" epochs", leave=False, disable=None) as bar,
        new_folder(out / "images" / MODEL, COMMAND) as unfinished,
    ):

        def on_line(line: str) -> None:
            epoch = _EPOCH_STARTS.match(line)
            if epoch is not None:
                bar.update(min(int(epoch[1]) + 1, budget.epochs) - bar.n)

        command = train_command(trainer, folder, budget.epochs, unfinished)
        training = run(command, out / "logs" / f"{MODEL}.train.log", on_line)
    # The last checkpoint, not the best one: the held-out digits must not select the checkpoint that they test.
    epochs = read_summary(out / "images" / MODEL / "summary.csv")
    parameters, top1, maps = examine(out / "images" / MODEL / "last.pth.tar", folder)
    print(f"  {top1:.1f} % of {VALIDATION_DIGITS} held-out digits right, {training.seconds:.0f} s")
    name = "timm's train.py" if timm_scripts is not None else "a loop of timm's parts"
    return ImageResult(parameters, digits, epochs, training, name, top1, maps)


def train_command(trainer: list[object], data: Path, epochs: int, folder: Path, seed: int = 1) -> list[str]:
    """The command that trains on the digits in ``data`` and writes to ``folder``."""
    return python_command(
        *(*trainer, "--data-dir", data, "--device-modules", "timm_plugin", "--device", "cpu"),
        *("--model", MODEL, "--num-classes", 10, "--epochs", epochs),
        *("--warmup-epochs", min(2, epochs - 1), "--batch-size", 64),
        *"--opt adamw --lr 2e-3 --weight-decay 0.05 --sched cosine --smoothing 0.1".split(),
        *"--scale 0.7 1.0 --hflip 0 --color-jitter 0 --workers 0".split(),
        *("--seed", seed, "--checkpoint-hist", 1, "--log-interval", 1000),
        *("--output", folder.parent, "--experiment", folder.name),
    )


def read_summary(path: Path) -> list[Epoch]:
    """Read the epochs in timm's summary.csv."""
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Epoch(int(row["epoch"]), float(row["train_loss"]), float(row["eval_loss"]), float(row["eval_top1"]))
            for row in csv.DictReader(file)
        ]


def examine(checkpoint: Path, folder: Path, digits_shown: int = 6) -> tuple:
    """Load a checkpoint; returns its number of parameters, accuracy on the held-out digits in percent, and maps."""
    # Imported here, since the demo's process does not need torch otherwise.
    import torch
    from timm.data import create_dataset, create_transform, resolve_data_config
    from timm.models import create_model

    import timm_plugin  # noqa: F401  (registers the model)
    from common.attention import record_attention

    model = create_model(MODEL, num_classes=10, checkpoint_path=str(checkpoint)).eval()
    data = resolve_data_config({}, model=model)
    dataset = create_dataset("", root=str(folder), split="validation")
    dataset.transform = create_transform(**data, is_training=False)
    images, labels = zip(*(dataset[i] for i in range(len(dataset))))
    images, labels = torch.stack(images), torch.tensor(labels)
    # One image for each of ``digits_shown`` digits, spread over the ten.
    shown_indices = [
        int((labels == digit).nonzero()[0]) for digit in np.linspace(0, 9, digits_shown).round().astype(int)
    ]
    with torch.no_grad():
        predictions = model(images).argmax(-1)
        with record_attention(model) as records:
            model(images[shown_indices])
    # A layer of the first stage, which has the finest map.
    finest_record = max(records, key=lambda record: record.allocation.shape[-1])
    mean, std = (torch.tensor(data[name])[:, None, None] for name in ("mean", "std"))
    maps = Maps(
        labels[shown_indices].tolist(),
        predictions[shown_indices].tolist(),
        (images[shown_indices] * std + mean).mean(1).clamp(0, 1).numpy(),
        _as_map(finest_record.competition),
        _as_map(finest_record.allocation),
        finest_record.name,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, (predictions == labels).float().mean().item() * 100, maps


def _as_map(weights) -> np.ndarray:
    """Weights (B, H, n) of a square map -> mean over heads (B, side, side)."""
    side = round(weights.shape[-1] ** 0.5)
    return weights.mean(1).unflatten(-1, (side, side)).numpy()
