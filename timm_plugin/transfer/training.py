"""The training loop of an attention transfer, made of timm's parts; an interruption does not change its result."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import AverageMeter, dispatch_clip_grad, random_seed
from torch.utils.data import DataLoader

from common.checkpoints import read_checkpoint
from common.files import tensor_files

from .task import AttentionTransferTask

logger = logging.getLogger("timm_plugin")
_ALLOWED = "what this command wrote there, or its folder removed to begin anew"


@dataclass(frozen=True)
class Settings:
    """How a transfer learns; names and meanings are those of timm's train.py. The learning rate decays by a cosine."""

    epochs: int = 2
    opt: str = "adamw"
    lr: float = 1e-2
    weight_decay: float = 0.0
    warmup_epochs: int = 0
    clip_grad: float | None = None
    seed: int = 42
    log_interval: int = 50


def train(
    task: AttentionTransferTask,
    loader: DataLoader,
    settings: Settings,
    state: Path | None = None,
    options: Mapping[str, Any] | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, float]:
    """Train the layers of ``task`` on the images of ``loader``; returns the mean loss of each in the last epoch.

    Each epoch begins with new seeds for all random numbers of the process, and ends with writing a file. An interrupted
    run continues from this file, with the same result, if ``loader`` keeps no state between epochs (no persistent
    workers).

    Args:
        state: the file of an unfinished run, which is continued if the file exists; None writes no file.
        options: what else the run depends on, in addition to ``settings`` and the teacher, as JSON values.
        autocast: makes the context of each forward pass.

    Raises:
        ValueError: there is no batch; ``state`` is of a run with other settings, options or another teacher.
    """
    updates = len(loader)
    if not updates:
        raise ValueError("there is not one whole batch of images; allowed: smaller batches, or more images")
    optimizer = create_optimizer_v2(
        task.get_trainable_module(), settings.opt, lr=settings.lr, weight_decay=settings.weight_decay
    )
    timing = {"num_epochs": settings.epochs, "warmup_epochs": settings.warmup_epochs}
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", step_on_epochs=False, updates_per_epoch=updates, **timing)
    run = {**asdict(settings), **(options or {}), "updates": updates}
    del run["log_interval"]
    first, losses = 0, {}
    if state is not None and state.exists():
        first, losses = _restore(task, optimizer, state, run)
        logger.info(f"{state}: {first} of {settings.epochs} epochs are done")
    for epoch in range(first, settings.epochs):
        random_seed(settings.seed + epoch)
        scheduler.step_update(epoch * updates)
        losses = _epoch(task, loader, optimizer, scheduler, epoch, settings, autocast)
        if state is not None:
            _save(task, optimizer, state, {"run": run, "epochs": epoch + 1, "losses": losses})
    return losses


def _epoch(
    task: AttentionTransferTask,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler,
    epoch: int,
    settings: Settings,
    autocast: Callable[[], AbstractContextManager],
) -> dict[str, float]:
    """One pass over the images; returns the mean loss of each layer."""
    meter, by_layer, images, started = AverageMeter(), 0.0, 0, time.perf_counter()
    for i, (input, target) in enumerate(loader):
        input = input.to(task.device)
        with autocast():
            result = task(input, target)
        optimizer.zero_grad()
        result["loss"].backward()
        if settings.clip_grad is not None:
            dispatch_clip_grad(task.get_clip_parameters(), settings.clip_grad)
        optimizer.step()
        done = epoch * len(loader) + i + 1
        scheduler.step_update(done)
        meter.update(result["loss"].item(), len(input))
        by_layer = by_layer + result["layer_losses"] * len(input)
        images += len(input)
        if (i + 1) % settings.log_interval == 0 or i in (0, len(loader) - 1):
            seconds = time.perf_counter() - started
            remaining = timedelta(seconds=round(seconds / (i + 1) * (settings.epochs * len(loader) - done)))
            logger.info(
                f"transfer: {epoch + 1}/{settings.epochs} [{i + 1:>4d}/{len(loader)}]  loss {meter.val:#.4g} "
                f"({meter.avg:#.4g})  lr {optimizer.param_groups[0]['lr']:.3e}  "
                f"{images / seconds:.1f} images/s  {remaining} left"
            )
    return dict(zip(task.layer_names, (by_layer / images).tolist()))


def _save(task: AttentionTransferTask, optimizer: torch.optim.Optimizer, state: Path, progress: dict[str, Any]) -> None:
    """Replace the file ``state``, completely or not at all."""
    part = state.with_name(state.name + ".new")
    contents = {**progress, "teacher": _digest(task), "student": task.own_state(), "optimizer": optimizer.state_dict()}
    tensor_files.save(contents, part)
    os.replace(part, state)


def _restore(
    task: AttentionTransferTask, optimizer: torch.optim.Optimizer, state: Path, run: dict[str, Any]
) -> tuple[int, dict[str, float]]:
    """Load ``state``; returns the number of finished epochs, and the layers' losses in the last one."""
    stored = read_checkpoint(state)
    _check_stored(stored, task, state)
    changed = sorted(name for name in run.keys() | stored["run"].keys() if run.get(name) != stored["run"].get(name))
    if changed or stored["teacher"] != _digest(task):
        changes = "; ".join(f"{name} is {run.get(name)!r}, there {stored['run'].get(name)!r}" for name in changed)
        raise ValueError(
            f"{state} is of another transfer, which is unfinished: {changes or 'its teacher has other weights'}; "
            "allowed: the same again, or its folder removed"
        )
    try:
        task.load_own_state(stored["student"])
        optimizer.load_state_dict(stored["optimizer"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{state} is damaged: {reason}; allowed: {_ALLOWED}") from error
    return stored["epochs"], stored["losses"]


def _check_stored(stored: dict[str, Any], task: AttentionTransferTask, state: Path) -> None:
    """Raise ValueError unless ``stored``, the content of the file ``state``, has the entries that ``_save`` writes."""
    kinds = {"run": dict, "epochs": int, "losses": dict, "teacher": str, "student": dict, "optimizer": dict}
    wrong = [name for name, kind in kinds.items() if type(stored.get(name)) is not kind]
    if not wrong and (stored["epochs"] < 1 or list(stored["losses"]) != list(task.layer_names)):
        wrong = ["epochs or losses"]
    if wrong:
        raise ValueError(f"{state} is no unfinished transfer of these layers: {wrong[0]}; allowed: {_ALLOWED}")


def _digest(task: AttentionTransferTask) -> str:
    """A digest of the teacher's weights, to detect another teacher."""
    return tensor_files.digest(task.teacher_state())
