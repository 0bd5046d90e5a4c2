"""A training loop built from timm's parts, for use without timm's train.py, which is not in its wheel.

``python -m recipes.demo.train_digits --help``. Its options are a subset of train.py's with the same names and
meanings, and it writes the same files, so that one command line works for both.
"""

import argparse
import functools
import importlib
import sys
from pathlib import Path

from timm.data import resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model, is_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, random_seed, update_summary

from common.command_parser import CommandParser
from timm_plugin.named_values import NamedValues

from ..shared.image_folder import check_layout
from ..shared.image_training import loader, train_epoch, validate
from ..shared.scripts import script
from ..shared.working_folder import register, working_folder

COMMAND = "recipes.demo.train_digits"
#: Files that timm writes.
FILES = ("summary.csv", "last.pth.tar", "model_best.pth.tar", "tmp.pth.tar")


def parser() -> CommandParser:
    """The options, as in train.py. All have plain types: timm refuses to load checkpoints with other types."""
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="folder with train/ and validation/")
    parser.add_argument("--device-modules", nargs="+", default=[], help="modules to import first, such as timm_plugin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=NamedValues, help="of the model, NAME=VALUE")
    parser.add_argument("--img-size", type=int, help="side of the images; default: the model's")
    parser.add_argument("--num-classes", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--sched", default="cosine")
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--scale", type=float, nargs=2, default=(0.08, 1.0), help="random resize and crop: area")
    parser.add_argument("--hflip", type=float, default=0.5)
    parser.add_argument("--color-jitter", type=float, default=0.4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint-hist", type=int, default=10)
    parser.add_argument("--output", default=".")
    parser.add_argument("--experiment", required=True, help="sub-folder of --output")
    parser.add_argument("--log-interval", type=int, default=50, help="accepted for train.py's sake; epochs are logged")
    return parser


@script("train_digits")
def main(arguments: list[str] | None = None) -> int:
    """Train; writes summary.csv, last.pth.tar and model_best.pth.tar to --output/--experiment. Returns 0."""
    options = parser().parse_args(arguments)
    with working_folder(Path(options.output, options.experiment), COMMAND, "--output with --experiment"):
        return train(options)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--device-modules is {module}: {error}; allowed: modules that can be imported") from error


def train(options: argparse.Namespace) -> int:
    """Train as specified by the options.

    Raises:
        ValueError: a module, a model or a folder of images does not exist.
    """
    for module in options.device_modules:
        _import(module)
    if not is_model(options.model) and ":" not in options.model:  # timm checks names such as local-dir:FOLDER
        raise ValueError(f"--model is {options.model}; allowed: a model of timm or of --device-modules")
    check_layout(Path(options.data_dir))
    random_seed(options.seed)
    model = create_model(options.model, num_classes=options.num_classes, **options.model_kwargs).to(options.device)
    data = resolve_data_config({"img_size": options.img_size}, model=model)

    split_loader = functools.partial(
        loader,
        Path(options.data_dir),
        data=data,
        batch=options.batch_size,
        workers=options.workers,
        device=options.device,
    )
    train_loader = split_loader(
        split="train", scale=tuple(options.scale), hflip=options.hflip, color_jitter=options.color_jitter
    )
    validation_loader = split_loader(split="validation")
    optimizer = create_optimizer_v2(model, opt=options.opt, lr=options.lr, weight_decay=options.weight_decay)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched=options.sched, num_epochs=options.epochs, warmup_epochs=options.warmup_epochs
    )
    folder = Path(options.output, options.experiment)
    for name in (*FILES, *(f"checkpoint-{epoch}.pth.tar" for epoch in range(options.epochs))):
        register(folder / name)
    (folder / FILES[0]).unlink(missing_ok=True)  # timm would append to the file of an earlier training
    saver = CheckpointSaver(
        model,
        optimizer,
        args=options,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
        max_history=options.checkpoint_hist,
    )
    criterion = LabelSmoothingCrossEntropy(options.smoothing)
    for epoch in range(epochs):
        train_metrics = train_epoch(model, train_loader, criterion, optimizer)
        scheduler.step(epoch + 1)
        validation_metrics = validate(model, validation_loader)
        lr = optimizer.param_groups[0]["lr"]
        update_summary(epoch, train_metrics, validation_metrics, folder / "summary.csv", lr=lr)
        saver.save_checkpoint(epoch, metric=validation_metrics["top1"])
        print(
            f"Train: {epoch} loss {train_metrics['loss']:.3f}  Test: top1 {validation_metrics['top1']:.2f}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
