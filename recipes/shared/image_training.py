"""A loop of timm's parts for small image models: loaders of a folder of images, an epoch, and a validation."""

from pathlib import Path
from typing import Any

import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.utils import AverageMeter, accuracy
from torch import nn
from torch.utils.data import DataLoader

BATCH = 64


def loaders(folder: Path, model: nn.Module) -> tuple[DataLoader, DataLoader]:
    """timm's loaders of the training digits and of the held-out ones."""
    data = resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=model)

    def loader(split: str, **augmentation: Any) -> DataLoader:
        return create_loader(
            create_dataset("", root=str(folder), split=split),
            input_size=data["input_size"],
            batch_size=BATCH,
            is_training=split == "train",
            interpolation=data["interpolation"],
            mean=data["mean"],
            std=data["std"],
            crop_pct=data["crop_pct"],
            num_workers=0,
            device=torch.device("cpu"),
            persistent_workers=False,
            **augmentation,
        )

    return loader("train", scale=(0.7, 1.0), hflip=0.0, color_jitter=0.0), loader("validation")


def train_epoch(
    model: nn.Module, loader: DataLoader, criterion: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Train for one pass over ``loader``; returns the mean loss."""
    model.train()
    losses = AverageMeter()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(labels))
    return {"loss": losses.avg}


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Compute the mean cross entropy, and accuracies in percent, over ``loader``."""
    model.eval()
    meters = {name: AverageMeter() for name in ("loss", "top1", "top5")}
    for images, labels in loader:
        logits = model(images)
        values = (nn.functional.cross_entropy(logits, labels), *accuracy(logits, labels, topk=(1, 5)))
        for meter, value in zip(meters.values(), values):
            meter.update(value.item(), len(labels))
    return {name: meter.avg for name, meter in meters.items()}
