"""The image half: train timm's DeiT on handwritten digits, then our models from its weights and from random ones."""

from pathlib import Path
from typing import Any

import timm
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch import nn
from tqdm import tqdm

import timm_plugin  # noqa: F401  (registers the models)
from common.files import tensor_files

from ..shared.comparison import Results
from ..shared.image_training import loaders, train_epoch, validate
from ..shared.json_files import measured
from ..shared.working_folder import atomic_write
from .starts import RANDOM, STOCK, record, with_both_starts

#: One shape for all, with 64 patches.
SHAPE: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_classes=10)
#: Arguments of each model beside the common shape; the first entry is the stock model.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": dict(num_heads=4),
    "flowformer_deit_ti": dict(num_heads=4),
    "daft_full_s": dict(num_heads=4, bias_dim=16),
    "daft_conv_s_h16": dict(num_heads=16, window=5),
}
_STOCK, *_OURS = ARGUMENTS
SOURCE, NAMES = f"{_STOCK}.{RANDOM}", with_both_starts(_OURS)
_SEED = 1


def build(name: str, checkpoint: Path | None = None) -> nn.Module:
    """The model ``name`` in the common shape, with ``checkpoint`` as its pretrained weights unless that is None."""
    random_seed(_SEED)
    overlay = {} if checkpoint is None else dict(pretrained_cfg_overlay=dict(file=str(checkpoint), num_classes=10))
    return timm.create_model(name, pretrained=checkpoint is not None, **overlay, **SHAPE, **ARGUMENTS[name])


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


def compare_images(runs: Path, folder: Path, source_epochs: int, epochs: int) -> Results:
    """Train the stock model on the digits in ``folder``, then ours, unless ``runs`` has them; a record each."""
    checkpoint = runs / f"{SOURCE}.pth"

    def learned(name: str) -> dict[str, float]:
        architecture, start = name.split(".")
        model = build(architecture, checkpoint if start == STOCK else None)
        before, after = train(model, folder, source_epochs if name == SOURCE else epochs, name)
        if name == SOURCE:
            with atomic_write(checkpoint) as part:
                tensor_files.save(model.state_dict(), part)
        return {"before": before["loss"], "after": after["loss"], "top1": after["top1"]}

    def kept(name: str) -> dict[str, float]:
        return measured(runs / f"{name}.json", lambda: learned(name), dict[str, float])

    return Results([record(name, kept(name)) for name in (SOURCE, *NAMES)], {})
