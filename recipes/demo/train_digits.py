"""A training loop built from timm's parts, for use without timm's train.py, which is not in its wheel.

``python -m recipes.demo.train_digits --help``. Its options are a subset of train.py's with the same names and
meanings, and it writes the same files, so that one command line works for both.
"""

import argparse
import importlib
from pathlib import Path

import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ParseKwargs, random_seed, update_summary

from ..images import train_epoch, validate


def parser() -> argparse.ArgumentParser:
    """The options, as in train.py. All have plain types: timm refuses to load checkpoints with other types."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--data-dir", required=True, help="folder with train/ and validation/")
    made.add_argument("--device-modules", nargs="+", default=[], help="modules to import first, such as timm_plugin")
    made.add_argument("--device", default="cpu")
    made.add_argument("--model", required=True)
    made.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs, help="of the model, NAME=VALUE")
    made.add_argument("--img-size", type=int, help="side of the images; default: the model's")
    made.add_argument("--num-classes", type=int, required=True)
    made.add_argument("--epochs", type=int, default=10)
    made.add_argument("--warmup-epochs", type=int, default=1)
    made.add_argument("--batch-size", type=int, default=64)
    made.add_argument("--opt", default="adamw")
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--weight-decay", type=float, default=0.05)
    made.add_argument("--sched", default="cosine")
    made.add_argument("--smoothing", type=float, default=0.1)
    made.add_argument("--scale", type=float, nargs=2, default=(0.08, 1.0), help="random resize and crop: area")
    made.add_argument("--hflip", type=float, default=0.5)
    made.add_argument("--color-jitter", type=float, default=0.4)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--seed", type=int, default=42)
    made.add_argument("--checkpoint-hist", type=int, default=10)
    made.add_argument("--output", default=".")
    made.add_argument("--experiment", required=True, help="sub-folder of --output, which is new")
    made.add_argument("--log-interval", type=int, default=50, help="accepted for train.py's sake; epochs are logged")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Train; writes summary.csv, last.pth.tar and model_best.pth.tar to --output/--experiment."""
    options = parser().parse_args(arguments)
    folder = Path(options.output, options.experiment)
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"--output with --experiment is {folder}, which has files; allowed: a new folder")
    for module in options.device_modules:
        importlib.import_module(module)
    random_seed(options.seed)
    model = create_model(options.model, num_classes=options.num_classes, **options.model_kwargs).to(options.device)
    data = resolve_data_config({"img_size": options.img_size}, model=model)
    settings = {name: data[name] for name in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    settings |= {"batch_size": options.batch_size, "num_workers": options.workers}
    settings["device"] = torch.device(options.device)
    settings["persistent_workers"] = options.workers > 0
    augmentation = {"scale": tuple(options.scale), "hflip": options.hflip, "color_jitter": options.color_jitter}
    training, held_out = (create_dataset("", options.data_dir, split) for split in ("train", "validation"))
    train_loader = create_loader(training, is_training=True, **settings, **augmentation)
    validation_loader = create_loader(held_out, **settings)
    optimizer = create_optimizer_v2(model, opt=options.opt, lr=options.lr, weight_decay=options.weight_decay)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched=options.sched, num_epochs=options.epochs, warmup_epochs=options.warmup_epochs
    )
    folder.mkdir(parents=True, exist_ok=True)
    saver = CheckpointSaver(model, optimizer, options, checkpoint_dir=folder, max_history=options.checkpoint_hist)
    for epoch in range(epochs):
        loss = train_epoch(model, train_loader, optimizer, smoothing=options.smoothing)
        scheduler.step(epoch + 1)
        metrics = validate(model, validation_loader)
        lr = optimizer.param_groups[0]["lr"]
        update_summary(epoch, {"loss": loss}, metrics, folder / "summary.csv", lr=lr)
        saver.save_checkpoint(epoch, metric=metrics["top1"])
        print(f"Train: {epoch} loss {loss:.3f}  Test: top1 {metrics['top1']:.2f}", flush=True)


if __name__ == "__main__":
    main()
