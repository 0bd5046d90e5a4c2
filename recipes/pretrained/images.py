"""The image half: train timm's DeiT on handwritten digits, then our models from its weights and from random ones."""

from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import timm_plugin  # noqa: F401  (registers the models)
from common import tensor_files
from common.output_files import new_folder

from ..demo.digits import write_digits
from ..demo.train_digits import train_epoch, validate
from ..shared.working_folder import own_file
from .results import COMMAND, RANDOM, STOCK, Half, Outcome

#: The folder of the data.
DIGITS = "digits"
SOURCE = "deit_tiny_patch16_224"
#: One shape for all, with 64 patches.
SHAPE: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_classes=10)
#: Arguments of each model beside the common shape; the first entry is the stock model.
ARGUMENTS: dict[str, dict[str, Any]] = {
    SOURCE: dict(num_heads=4),
    "flowformer_deit_ti": dict(num_heads=4),
    "daft_full_s": dict(num_heads=4, bias_dim=16),
    "daft_conv_s_h16": dict(num_heads=16, window=5),
}
_BATCH, _SEED = 64, 1


def build(name: str, checkpoint: Path | None = None) -> nn.Module:
    """The model ``name`` in the common shape, with ``checkpoint`` as its pretrained weights unless that is None."""
    random_seed(_SEED)
    overlay = {} if checkpoint is None else dict(pretrained_cfg_overlay=dict(file=str(checkpoint), num_classes=10))
    return timm.create_model(name, pretrained=checkpoint is not None, **overlay, **SHAPE, **ARGUMENTS[name])


def loaders(folder: Path, model: nn.Module) -> tuple[DataLoader, DataLoader]:
    """timm's loaders of the training digits and of the held-out ones."""
    data = resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=model)

    def loader(split: str, **augmentation: Any) -> DataLoader:
        return create_loader(
            create_dataset("", root=str(folder), split=split),
            input_size=data["input_size"],
            batch_size=_BATCH,
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


def train(model: nn.Module, folder: Path, epochs: int, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Train; returns loss and accuracy on the held-out digits before and after."""
    random_seed(_SEED)
    learn, hold = loaders(folder, model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    warmup = min(1, epochs - 1)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=warmup)
    before = validate(model, hold)
    for epoch in tqdm(range(epochs), desc=f"  {name}", unit=" epochs", leave=False, disable=None):
        train_epoch(model, learn, LabelSmoothingCrossEntropy(0.1), optimizer)
        scheduler.step(epoch + 1)
    return before, validate(model, hold)


def compare_images(out: Path, source_epochs: int, epochs: int) -> Half:
    """Train the stock model on the digits, then ours from its weights and from random ones."""
    print("Images: scikit-learn's handwritten digits", flush=True)
    folder, checkpoint = out / DIGITS, out / f"{SOURCE}.pth"
    with new_folder(folder, COMMAND) as new:
        updates = epochs * (write_digits(new)["train"] // _BATCH)
    stock = build(SOURCE)
    _, learned = train(stock, folder, source_epochs, SOURCE)
    with own_file(checkpoint) as part:
        tensor_files.save(stock.state_dict(), part)
    outcomes = []
    for name in list(ARGUMENTS)[1:]:
        for start, file in ((STOCK, checkpoint), (RANDOM, None)):
            before, after = train(build(name, file), folder, epochs, f"{name} from {start}")
            outcomes.append(Outcome(name, start, before["loss"], after["loss"], after["top1"]))
            print(
                f"  {name} from {start}: {before['loss']:.3f}, after {updates} updates {after['loss']:.3f}", flush=True
            )
    source = f"{SOURCE} of the same size after {source_epochs} epochs"
    return Half("Image models, handwritten digits", "nats per image", source, learned["loss"], updates, outcomes)
