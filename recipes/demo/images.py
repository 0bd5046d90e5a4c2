"""The image half of the demo: a hierarchical Flowformer learns handwritten digits with timm."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from timm.models import create_model
from torch import Tensor

import timm_plugin  # noqa: F401  (registers the model)
from common.attention import record_attention

from .. import images, runs

MODEL = "flowformer_hier_digits"


class Maps(NamedTuple):
    """Flow-Attention's weights for a few digits, (digit, height, width)."""

    labels: list[int]
    predictions: list[int]
    images: Tensor  # 0..1
    competition: Tensor  # mean over heads
    allocation: Tensor
    layer: str


def train(out: Path, epochs: int) -> tuple[pd.DataFrame, float]:
    """Train unless that is done; timm's summary, and the peak of memory in MiB."""
    print("Images: scikit-learn's handwritten digits", flush=True)
    images.write_digits(out / "digits")
    command = [
        *("-m", "recipes.demo.train_digits", "--data-dir", out / "digits", "--device-modules", "timm_plugin"),
        *("--model", MODEL, "--num-classes", 10, "--epochs", epochs, "--warmup-epochs", min(2, epochs - 1)),
        *"--lr 2e-3 --scale 0.7 1.0 --hflip 0 --color-jitter 0 --workers 0 --seed 1 --checkpoint-hist 1".split(),
        *("--output", out / "runs", "--experiment", MODEL),
    ]
    peak = out / f"{MODEL}.MiB"  # written last
    if not peak.exists():
        peak_MiB = runs.run(command, out / f"{MODEL}.log", os.cpu_count())
        peak.write_text(str(peak_MiB))
    return pd.read_csv(out / "runs" / MODEL / "summary.csv"), float(peak.read_text())


@torch.no_grad()
def examine(checkpoint: Path, folder: Path, digits_shown: int = 6) -> tuple[int, float, Maps]:
    """The parameters of a checkpoint, its accuracy on the held-out digits in percent, and maps of its attention."""
    model = create_model(MODEL, num_classes=10, checkpoint_path=str(checkpoint)).eval()
    pixels, labels = map(torch.cat, zip(*images.loaders(folder, model)[1]))
    # One image for each of ``digits_shown`` digits, spread over the ten.
    digits = np.linspace(0, 9, digits_shown).round().astype(int)
    shown = [int((labels == digit).nonzero()[0]) for digit in digits]
    predictions = model(pixels).argmax(-1)
    with record_attention(model) as records:
        model(pixels[shown])
    # A layer of the first stage, which has the finest map.
    finest = max(records, key=lambda record: record.allocation.shape[-1])
    mean, std = (torch.tensor(model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    maps = Maps(
        labels[shown].tolist(),
        predictions[shown].tolist(),
        (pixels[shown] * std + mean).mean(1).clamp(0, 1),
        *(x.mean(1).unflatten(-1, (math.isqrt(x.shape[-1]), -1)) for x in (finest.competition, finest.allocation)),
        finest.name,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, 100 * (predictions == labels).double().mean().item(), maps


def draw_losses(axes: runs.plt.Axes, summary: pd.DataFrame) -> None:
    """Losses and accuracy by epoch."""
    axes.plot(summary.epoch + 1, summary.train_loss, label="train loss")
    axes.plot(summary.epoch + 1, summary.eval_loss, "o-", label="held-out loss")
    axes.plot([], [], "C3", label="held-out accuracy")
    axes.set(title=f"{MODEL}: handwritten digits", xlabel="epochs", ylabel="loss, nats per image", ylim=(0, None))
    axes.legend(frameon=False, loc="center right")
    accuracy = axes.twinx()
    accuracy.plot(summary.epoch + 1, summary.eval_top1, "C3")
    accuracy.set(ylabel="held-out accuracy, %", ylim=(0, 101))


def draw_maps(figure: runs.plt.Figure, maps: Maps) -> None:
    """A few digits, and how much their tokens may send and let in."""
    side = maps.competition.shape[-1]
    figure.suptitle(f"Flow-Attention's weights in {maps.layer}: {side} x {side} tokens, mean over heads")
    rows = (
        ("held-out digit", maps.images, "gray"),
        ("competition: how much\na source may send\n(1 = its even share)", maps.competition, "viridis"),
        ("allocation: how much\na sink lets in (0..1)", maps.allocation, "magma"),
    )
    grid = figure.subplots(len(rows), len(maps.labels), squeeze=False)
    for axes_row, (title, values, colours) in zip(grid, rows):
        for axes, value in zip(axes_row, values):  # a pixel of a map is a token: no smoothing
            shown = axes.imshow(value, cmap=colours, vmin=values.min(), vmax=values.max(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        axes_row[0].set_ylabel(title, rotation=0, ha="right", va="center", labelpad=8)
        figure.colorbar(shown, ax=axes_row, shrink=0.9, pad=0.015)
    for axes, label, prediction in zip(grid[0], maps.labels, maps.predictions):
        axes.set_title(f"{label}, read as {prediction}", color="black" if label == prediction else "#D00000")
