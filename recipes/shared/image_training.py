"""Loops of timm's parts for small image models: loaders of a folder or of images in memory, an epoch, a validation."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, accuracy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader
from tqdm import tqdm

from .image_folder import list_images, read_image

BATCH = 64
#: How much an image is moved in training: each entry of a linear map differs from the identity by at most this, and the
#: image is shifted by at most this part of its side.
_MOST_MOVED = 0.08


def loaders(folder: Path, model: nn.Module) -> tuple[DataLoader, DataLoader]:
    """timm's loaders of the training digits and of the held-out ones."""
    data = resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=model)
    train = loader(folder, "train", data, BATCH, scale=(0.7, 1.0), hflip=0.0, color_jitter=0.0)
    return train, loader(folder, "validation", data, BATCH)


def loader(
    folder: Path, split: str, data: dict, batch: int, workers: int = 0, device: str = "cpu", **augmentation: Any
) -> DataLoader:
    """timm's loader of a split; ``data`` is what timm's ``resolve_data_config`` returned for the model."""
    return create_loader(
        create_dataset("", root=str(folder), split=split),
        input_size=data["input_size"],
        batch_size=batch,
        is_training=split == "train",
        interpolation=data["interpolation"],
        mean=data["mean"],
        std=data["std"],
        crop_pct=data["crop_pct"],
        num_workers=workers,
        device=torch.device(device),
        persistent_workers=workers > 0,
        **augmentation,
    )


class Images(NamedTuple):
    """Images in memory: pixels (N, C, H, W), of mean 0 and deviation 1 in the train split, and classes (N,), int64."""

    pixels: Tensor
    labels: Tensor


def read_images(folder: Path, side: int) -> dict[str, Images]:
    """The images of a folder by split, as squares of ``side`` pixels; of one channel if all are grey, else of three.

    Raises:
        ValueError: see ``list_images`` and ``read_image``, or the images to learn from are all of one grey.
    """
    splits = {}
    for split, listed in list_images(folder).items():
        images = [
            read_image(path, side, grey=False) for path, _ in tqdm(listed, f"  {split}", leave=False, disable=None)
        ]
        labels = torch.tensor([number for _, number in listed])
        splits[split] = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), labels  # (N, H, W, C) -> (N, C, H, W)
    grey = all(bool((pixels == pixels[:, :1]).all()) for pixels, _ in splits.values())
    channels = 1 if grey else 3
    floats = {split: pixels[:, :channels].float() for split, (pixels, _) in splits.items()}
    if floats["train"].min() == floats["train"].max():
        raise ValueError(f"all images in {folder / 'train'} are of one grey; allowed: images that differ")
    deviation, mean = torch.std_mean(floats["train"])
    return {split: Images((pixels - mean) / deviation, splits[split][1]) for split, pixels in floats.items()}


def resized(images: Images, side: int) -> Images:
    """``images`` in another size."""
    return images._replace(pixels=F.interpolate(images.pixels, side, mode="bicubic", antialias=True))


class Batches:
    """Batches of images in memory, as a loader gives them: in training shuffled, and each image moved a little."""

    def __init__(self, images: Images, size: int = BATCH, training: bool = False) -> None:
        self.images, self.size, self.training = images, size, training

    def __len__(self) -> int:
        return math.ceil(len(self.images.labels) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images.labels)
        for chosen in (torch.randperm(count) if self.training else torch.arange(count)).split(self.size):
            pixels = self.images.pixels[chosen]
            yield moved(pixels) if self.training else pixels, self.images.labels[chosen]


def moved(pixels: Tensor) -> Tensor:
    """Images (B, C, H, W), each stretched, sheared, turned and shifted a little, at random; borders are repeated."""
    identity = torch.eye(2, 3).expand(len(pixels), 2, 3)
    maps = identity + _MOST_MOVED * (2 * torch.rand(identity.shape) - 1)
    maps[:, :, 2] *= 2  # coordinates go from -1 to 1
    grid = F.affine_grid(maps, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def fit(model: nn.Module, images: Images, epochs: int, batch: int, lr: float, title: str) -> None:
    """Train on images in memory, ``batch`` in an update, with DeiT's optimiser and label smoothing.

    The learning rate rises to ``lr`` in a tenth of the updates, and falls to 0 along a cosine; at most 10 updates have
    no such tenth.
    """
    loader = Batches(images, batch, training=True)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)
    updates = epochs * len(loader)
    rising = 0.1 if updates > 10 else 0.0  # OneCycleLR divides by the updates between the first and the highest one
    schedule = OneCycleLR(optimizer, lr, total_steps=updates, pct_start=rising, cycle_momentum=False)
    for _ in tqdm(range(epochs), desc=f"  {title}", unit=" epochs", leave=False, disable=None):
        train_epoch(model, loader, LabelSmoothingCrossEntropy(0.1), optimizer, schedule)


def train_epoch(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
) -> dict[str, float]:
    """Train for one pass over ``loader``; returns the mean loss. ``schedule`` goes on after each update."""
    model.train()
    losses = AverageMeter()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.update(loss.item(), len(labels))
    return {"loss": losses.avg}


@torch.no_grad()
def validate(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compute the mean cross entropy, and accuracies in percent, over ``loader``."""
    model.eval()
    meters = {name: AverageMeter() for name in ("loss", "top1", "top5")}
    for images, labels in loader:
        logits = model(images)
        values = (nn.functional.cross_entropy(logits, labels), *accuracy(logits, labels, topk=(1, 5)))
        for meter, value in zip(meters.values(), values):
            meter.update(value.item(), len(labels))
    return {name: meter.avg for name, meter in meters.items()}
