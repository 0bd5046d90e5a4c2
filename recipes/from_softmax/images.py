"""Make linear-time image models of a trained vision transformer: ``python -m recipes.from_softmax.images``.

On scikit-learn's handwritten digits, or with ``--cifar10 FOLDER`` on CIFAR-10. Models, loaders and tasks are timm's.
Run it again, and it goes on with the next form.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
from matplotlib import pyplot as plt
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask, LogitDistillationTask, TrainingTask
from timm.utils import random_seed
from torch import nn
from torchvision.datasets import CIFAR10
from tqdm import tqdm

import timm_plugin
from common.checkpoints import read_checkpoint
from timm_plugin.transfer import AttentionTransferTask

from ..images import loaders, validate, write_digits
from ..runs import begin, report
from . import stages
from .forms import DEFAULT, PARTS, Form, attending, forms
from .forms import add_options as add_form_options
from .stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED

MODEL = "vit_small_patch16_224"
SIDE, PATCH, CLASSES = 32, 4, 10
LOSS = LabelSmoothingCrossEntropy(0.1)


def write_cifar10(folder: Path, root: Path) -> None:
    """Write CIFAR-10, which torchvision downloads to ``root``, as images in the folders of timm, unless it is there."""
    complete = folder / "complete.txt"  # written last
    if not complete.exists():
        for split, part in (("train", True), ("validation", False)):
            for i, (image, label) in enumerate(tqdm(CIFAR10(root, train=part, download=True), split, disable=None)):
                path = folder / split / str(label) / f"{i:05d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
        complete.touch()


def build(options: argparse.Namespace, seed: int) -> nn.Module:
    """A vision transformer of timm for images of 32 x 32, with random weights."""
    random_seed(seed)
    shape = {"embed_dim": options.width, "depth": options.layers, "num_heads": options.heads}
    return timm.create_model(MODEL, num_classes=CLASSES, img_size=SIDE, patch_size=PATCH, **shape)


def train(options: argparse.Namespace, stage: str, task: TrainingTask, seed: int, name: str) -> None:
    """Run the training of ``task`` for the epochs of a stage."""
    random_seed(seed)
    epochs = stages.lasts(options, options.epochs)[stage]
    learn, _ = loaders(options.images, task.get_eval_model())
    decay, lr = 0.0 if stage == TRANSFERRED else 0.05, stages.rate(options, stage)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=lr, weight_decay=decay)
    warmup = min(1, epochs - 1)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=warmup)
    title = f"  {name}, {stage}, seed {seed}"
    for epoch in tqdm(range(epochs), desc=title, unit=" epochs", leave=False, disable=None):
        task.train()
        for images, labels in learn:
            loss = task(images, labels)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(epoch + 1)


def error(options: argparse.Namespace, model: nn.Module) -> float:
    """The error on the held-out images in per cent."""
    _, held_out = loaders(options.images, model)
    return 100.0 - validate(model, held_out)["top1"]


def train_teacher(options: argparse.Namespace, seed: int, weights: Path) -> dict[str, Any]:
    """The error of the teacher of a seed, whose weights are written."""
    model = build(options, seed)
    train(options, TEACHER, ClassificationTask(model, LOSS, verbose=False), seed, TEACHER)
    torch.save(model.state_dict(), weights)
    return {TEACHER: error(options, model)}


def convert(options: argparse.Namespace, name: str, form: Form, seed: int, weights: Path) -> dict[str, Any]:
    """Convert the teacher of a seed, and train the form from scratch; see ``stages`` for the results."""
    teacher = build(options, seed)
    teacher.load_state_dict(read_checkpoint(weights))
    teacher.eval()
    random_seed(seed)
    learn = {"learn_projections": form.learning == "attention", "verbose": False}
    transfer = AttentionTransferTask(teacher, form.pattern, **learn, **form.for_timm())
    learned = sum(x.numel() for x in transfer.get_trainable_module().parameters() if x.requires_grad)
    made = {"learned": learned, EXCHANGED: error(options, transfer.get_eval_model())}
    train(options, TRANSFERRED, transfer, seed, name)
    student = transfer.converted()
    made[TRANSFERRED] = error(options, student)
    weight = {"distill_loss_weight": stages.WEIGHT, "task_loss_weight": 1.0 - stages.WEIGHT}
    distillation = LogitDistillationTask(student, teacher, LOSS, **weight, verbose=False)
    train(options, DISTILLED, distillation, seed, name)
    made[DISTILLED] = error(options, student)
    for part in PARTS if form.windowed else ():
        with attending(student, part):
            made[part] = error(options, student)
    if not options.no_scratch:
        scratch = timm_plugin.replace_attention(build(options, seed), form.pattern, **form.for_timm())
        train(options, SCRATCH, ClassificationTask(scratch, LOSS, verbose=False), seed, name)
        made[SCRATCH] = error(options, scratch)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and draw."""
    parser = stages.parser(__doc__.splitlines()[0], "work/from_softmax/images", seeds=3)
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="where torchvision keeps it, or downloads it")
    for name, default in {"epochs": 40, "width": 64, "layers": 4, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the teacher")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest, of the teacher and from scratch")
    stages.add_options(parser)
    add_form_options(parser, DEFAULT, sinks=1)  # the class token alone sees all, and is seen by all
    options = parser.parse_args(arguments)
    options.epochs = min(10, options.epochs) if options.quick else options.epochs
    stages.lasts(options, options.epochs)
    options.forms = forms(parser, options, options.layers)
    added = ("forms", "models", "out", "seeds")  # may be others in the same folder
    begin(options.out, [f"{name}={value}" for name, value in vars(options).items() if name not in added])
    options.images, runs = options.out / "images", options.out / "runs"
    runs.mkdir(exist_ok=True)
    if options.cifar10:
        write_cifar10(options.images, options.cifar10)
    else:
        write_digits(options.images)
    rows = []
    for seed in range(1, options.seeds + 1):
        weights = runs / f"{TEACHER}.{seed}.pth"
        teacher = stages.stored(runs / f"{TEACHER}.{seed}.json", train_teacher, options, seed, weights)
        for name, form in options.forms.items():
            path = runs / f"{stages.file_name(name)}.{seed}.json"
            made = stages.stored(path, convert, options, name, form, seed, weights)
            rows.append({"model": name, "seed": seed, **teacher, **made})
    found = pd.DataFrame(rows)
    below = [
        f"error of the held-out images in per cent; {MODEL} of timm for {SIDE} x {SIDE} pixels in patches of {PATCH} x "
        f"{PATCH}, {options.layers} layers of width {options.width}, {options.heads} heads; "
        f"{'CIFAR-10' if options.cifar10 else 'digits'}",
        *stages.notes(options, options.epochs, "epochs"),
    ]
    report(options.out, stages.tables(found, float), below, found)
    columns = stages.sides(options.forms)
    size = {"figsize": (6.5 * len(columns), 4.8), "layout": "constrained"}
    figure, grid = plt.subplots(1, len(columns), sharey="row", squeeze=False, **size)
    for axes, (title, names) in zip(grid[0], columns.items()):
        stages.draw_stages(axes, found, names, float)
        axes.set_title(title)
    grid[0, 0].set_ylabel("error, held-out images, %")
    figure.savefig(options.out / "results.png", dpi=130)


if __name__ == "__main__":
    main()
