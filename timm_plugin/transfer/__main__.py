"""``python -m timm_plugin.transfer``: a checkpoint of a model with another attention, taught by its softmax attention.

The teacher is a model of timm with softmax attention: a name, whose weights timm downloads, or those of
``--teacher-checkpoint``; or a folder, ``local-dir:FOLDER``. A model with ``attn_layer=ATTN`` loads the checkpoint
strictly, in Python, and in timm's scripts with ``--initial-checkpoint`` and ``--checkpoint``. If the same command is
given again, an interrupted run continues.
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import save_for_hf
from timm.optim import list_optimizers
from timm.utils import random_seed
from torch import nn
from torch.utils.data import DataLoader

from common.checkpoints import check_state_dict
from common.command_parser import CommandParser
from common.files.output_files import check_new, give_usual_modes, new_path, unfinished
from common.ops.shared.checks import check_choice

from ..convert import check_suffix, read_weights, size_of_head, write
from ..layers.attention import usable_mechanisms
from ..layers.grid import fixed_grid, host_of_tokens
from ..layers.layer_spec import is_pattern, share_options
from ..named_values import NamedValues
from .imitation import LOSSES
from .task import AttentionTransferTask
from .training import Settings, train

COMMAND = "timm_plugin.transfer"
_STATE = "training.pth"
#: The smallest value of each option that is a count.
_LEAST = dict.fromkeys(("epochs", "batch_size", "log_interval", "in_chans", "img_size", "input_size"), 1)
_LEAST |= dict.fromkeys(("num_classes", "warmup_epochs", "workers"), 0)
#: Arguments that do not change the result.
_FREE = ("output", "teacher_dir", "log_interval", "workers", "device")


def build_teacher(name: str, checkpoint: Path | None, model_args: dict[str, Any], use_ema: bool = False) -> nn.Module:
    """The model ``name`` with the weights of ``checkpoint``, or with timm's weights for it.

    It has the checkpoint's number of classes unless ``model_args`` state another. ``use_ema``: as in ``read_weights``.

    Raises:
        ValueError: a file that cannot be read, or of another model or other sizes.
    """
    if checkpoint is None:
        if use_ema:
            raise ValueError("--use-ema is given without --teacher-checkpoint; allowed: with one")
        return timm.create_model(name, pretrained=True, **model_args)
    state_dict = read_weights(checkpoint, use_ema)
    classes = size_of_head(state_dict)
    if classes is not None:
        model_args = {"num_classes": classes, **model_args}
    model = timm.create_model(name, **model_args)
    check_state_dict(state_dict, model)
    model.load_state_dict(state_dict)
    return model


def read_attention(values: Sequence[str], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the ``attention`` and options of ``AttentionTransferTask`` that ``--attn`` and ``--attn-kwargs`` ask for.

    Raises:
        ValueError: ``--attn`` is neither a name, a pattern nor a list of PLACE=NAME; an option that no mechanism has.
    """
    if len(values) == 1 and "=" not in values[0]:
        return values[0], options
    places = dict(value.split("=", 1) if "=" in value else (value, "") for value in values)
    wrong = [value for value in values if not all(value.partition("="))]
    if wrong or len(places) < len(values) or any(is_pattern(name) for name in places.values()):
        raise ValueError(
            f"--attn is {' '.join(values)}; allowed: one name, one pattern such as 'flow*3,softmax', or places, each "
            "once, such as blocks.0-8=flow blocks.11=lolcats"
        )
    for name in places.values():
        check_choice("--attn", name, usable_mechanisms())
    return dict(zip(places, share_options(list(places.values()), options))), {}


def build_loader(teacher: nn.Module, options: argparse.Namespace) -> DataLoader:
    """Images for ``teacher``, augmented as train.py does by default; the loader keeps no state between epochs.

    Raises:
        ValueError: images of another size than the teacher's.
    """
    config = resolve_data_config(vars(options), model=teacher)
    grid, host = fixed_grid(teacher), host_of_tokens(teacher)
    size = None if grid is None else tuple(host.patch_embed.img_size)
    if size is not None and tuple(config["input_size"][1:]) != size:
        raise ValueError(
            f"images are {config['input_size'][1]} x {config['input_size'][2]}, and the teacher takes {size[0]} x "
            f"{size[1]}; allowed: --img-size {size[0]} or --input-size, or --model-kwargs img_size=..."
        )
    dataset = create_dataset(
        options.dataset,
        root=options.data_dir,
        split=options.train_split,
        is_training=True,
        batch_size=options.batch_size,
        seed=options.seed,
        input_img_mode="RGB" if config["input_size"][0] == 3 else "L",
    )
    return create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=options.batch_size,
        is_training=True,
        no_aug=options.no_aug,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        num_workers=options.workers,
        device=torch.device(options.device),
        use_prefetcher=False,
        persistent_workers=False,
    )


def transfer(options: argparse.Namespace) -> dict[str, float]:
    """Train, write the checkpoint, and optionally the teacher's folder; returns each layer's loss in the last epoch.

    Raises:
        ValueError: as ``AttentionTransferTask``, ``train`` and the functions above; an output that exists already.
    """
    check_new(options.output, "--output")
    if options.teacher_dir is not None:
        check_new(options.teacher_dir, "--teacher-dir")
    _check_options(options)
    attention, attention_options = read_attention(options.attn, options.attn_kwargs)
    random_seed(options.seed)
    model_args = {"num_classes": options.num_classes, "in_chans": options.in_chans}
    stated = {name: value for name, value in model_args.items() if value is not None}
    arguments = {**options.model_kwargs, **stated}
    teacher = build_teacher(options.teacher, options.teacher_checkpoint, arguments, bool(options.use_ema))
    device = torch.device(options.device)
    task = AttentionTransferTask(
        teacher.to(device), attention, options.loss, options.learn_projections, device=device, **attention_options
    )
    loader = build_loader(teacher, options)
    settings = Settings(**{name: value for name, value in vars(options).items() if name in Settings.__annotations__})
    stated_options = {name: value for name, value in vars(options).items() if name not in _FREE and value is not None}
    run = {name: str(value) for name, value in stated_options.items() if name not in Settings.__annotations__}
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if options.amp else nullcontext
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with _working_folder(options.output) as folder:
        losses = train(task, loader, settings, folder / _STATE, run, autocast)
        whole = folder / f"whole{options.output.suffix}"
        write(task.eval_model, whole)
        if options.teacher_dir is not None:
            with new_path(options.teacher_dir, "--teacher-dir") as new:
                save_for_hf(teacher, new, safe_serialization=True)
        check_new(options.output, "--output")
        give_usual_modes([whole], folder)
        whole.rename(options.output)
        (folder / _STATE).unlink()
    return losses


@contextmanager
def _working_folder(output: Path) -> Iterator[Path]:
    """A folder for unfinished work on ``output``; it is kept while it has the state of a training."""
    with unfinished(output, COMMAND, keep=True) as folder:
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            if not (folder / _STATE).exists():
                shutil.rmtree(folder)


def _check_options(options: argparse.Namespace) -> None:
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ValueError(
            f"torchrun started {processes} processes (WORLD_SIZE); allowed: python -m {COMMAND} by itself, or "
            "AttentionTransferTask and its prepare_distributed in a loop of your own"
        )
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed: {least} or more")
    if options.opt not in list_optimizers():
        raise ValueError(f"--opt is {options.opt!r}; allowed: {', '.join(list_optimizers())}")
    if not options.dataset and not Path(options.data_dir).exists():
        raise ValueError(f"--data-dir is {options.data_dir}, which is not there; allowed: a folder of images")
    if not options.output.suffix:
        raise ValueError(f"--output is {options.output}; allowed: a file, such as student.safetensors or student.pth")
    check_suffix(options.output, "--output")


def _parser() -> CommandParser:
    defaults = Settings()
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.split("\n")[0])
    add = parser.add_argument_group("teacher").add_argument
    add("--teacher", required=True, help="a model of timm with softmax attention, or local-dir:FOLDER")
    add("--teacher-checkpoint", type=Path, help="its weights; without, those that timm has for it")
    add(
        "--use-ema", action="store_true", default=None, help="the averaged weights of the checkpoint, as in validate.py"
    )
    add("--model-kwargs", nargs="*", default={}, action=NamedValues, help="its further arguments, as in train.py")
    add("--num-classes", type=int, help="its classes; by default those of the weights")
    add("--in-chans", type=int, help="its image channels")
    add = parser.add_argument_group("student").add_argument
    add(
        "--attn",
        required=True,
        nargs="+",
        help="its attention: a mechanism, a pattern such as 'flow*3,softmax', or places, blocks.0-8=flow",
    )
    add("--attn-kwargs", nargs="*", default={}, action=NamedValues, help="options of its mechanisms, NAME=VALUE")
    add("--output", required=True, type=Path, help="new file for its checkpoint, .safetensors or torch's")
    add("--teacher-dir", type=Path, help="new folder for the teacher, which train.py takes as --kd-model-name")
    add = parser.add_argument_group("transfer").add_argument
    add("--loss", choices=LOSSES, default=LOSSES[0], help="compare outputs, or weights of short inputs")
    add("--learn-projections", action="store_true", help="the projections to queries, keys and values learn, too")
    add("--epochs", type=int, default=defaults.epochs)
    add("--opt", default=defaults.opt, help="optimiser of timm")
    add("--lr", type=float, default=defaults.lr, help="learning rate, which falls by a cosine to 0")
    add("--weight-decay", type=float, default=defaults.weight_decay)
    add("--warmup-epochs", type=int, default=defaults.warmup_epochs)
    add("--clip-grad", type=float, help="greatest norm of the gradients")
    add("--seed", type=int, default=defaults.seed)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--amp", action="store_true", help="mixed precision, in bfloat16")
    add("--log-interval", type=int, default=defaults.log_interval, help="batches from a line of progress to the next")
    add = parser.add_argument_group("images, as in train.py").add_argument
    add("--data-dir", required=True)
    add("--dataset", default="", help="kind of data set; by default a folder of classes")
    add("--train-split", default="train")
    add("-b", "--batch-size", type=int, default=128)
    add("-j", "--workers", type=int, default=4)
    add("--img-size", type=int)
    add("--input-size", type=int, nargs=3, metavar=("C", "H", "W"))
    add("--mean", type=float, nargs="+")
    add("--std", type=float, nargs="+")
    add("--interpolation", default="")
    add("--no-aug", action="store_true", help="no augmentation")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run the command; if that fails, exit with one line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with parser.one_line_errors(RuntimeError, TypeError):  # TypeError: an unknown name in --model-kwargs
        losses = transfer(options)
    for name, loss in losses.items():
        print(f"{name}: loss {loss:#.4g}")
    print(f"{options.output}: {options.teacher} with attention {' '.join(options.attn)}")


if __name__ == "__main__":
    main(sys.argv[1:])
