"""The image half's models and trainings: timm's vision transformer, its attention exchanged, and timm's own tasks."""

import time
from pathlib import Path
from typing import Any

import timm
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from timm.utils import random_seed
from torch import nn
from tqdm import tqdm

import timm_plugin
from timm_plugin.transfer import AttentionTransferTask

from ..shared.image_training import loaders, validate
from .forms import Form
from .results import TEST

MODEL = "vit_small_patch16_224"
SIDE, PATCH, CLASSES = 32, 4, 10
#: The name of the cross-entropy among the losses of an image model; the other loss is the error.
ENTROPY = "cross-entropy"


def build(width: int, layers: int, heads: int, seed: int) -> nn.Module:
    """A vision transformer of timm for images of 32 x 32, with random weights."""
    random_seed(seed)
    shape: dict[str, Any] = dict(img_size=SIDE, patch_size=PATCH, embed_dim=width, depth=layers, num_heads=heads)
    return timm.create_model(MODEL, num_classes=CLASSES, **shape)


def exchange(model: nn.Module, form: Form) -> nn.Module:
    """``model`` with the attention of a form in its blocks, in place."""
    return timm_plugin.replace_attention(model, form.pattern, **form.own_options())


def transfer_task(teacher: nn.Module, form: Form) -> AttentionTransferTask:
    """Stage 1: a form's attention learns to imitate the ``teacher``; its projections learn too if it has no maps."""
    return AttentionTransferTask(
        teacher, form.pattern, learn_projections=not form.learns_maps, verbose=False, **form.own_options()
    )


def train(task: TrainingTask, folder: Path, epochs: int, lr: float, decay: float, seed: int, title: str) -> float:
    """Run the training of ``task``; returns the seconds."""
    random_seed(seed)
    learn, _ = loaders(folder, task.get_eval_model())
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=lr, weight_decay=decay)
    warmup = min(1, epochs - 1)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=warmup)
    started = time.monotonic()
    for epoch in tqdm(range(epochs), desc=f"  {title}", unit=" epochs", leave=False, disable=None):
        task.train()
        for images, labels in learn:
            loss = task(images, labels)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(epoch + 1)
    return time.monotonic() - started


def losses(model: nn.Module, folder: Path) -> dict[str, float]:
    """The error on the held-out images in per cent, and their cross-entropy in nats."""
    _, hold = loaders(folder, model)
    metrics = validate(model, hold)
    return {TEST: 100.0 - metrics["top1"], ENTROPY: metrics["loss"]}
