"""``python -m timm_plugin.convert MODEL SOURCE TARGET``: a checkpoint that starts MODEL, from one of another model.

SOURCE is a stock ViT or DeiT for ``flowformer_deit_*`` and ``daft_*``, the authors' released weights for
``flowformer_hier_s_12h``, or one of our models for another image size. Weights of a stock model are only a start: with
another attention the model computes something else, and ``python -m timm_plugin.transfer`` trains that attention to
imitate the softmax attention. TARGET is a new file, ``.safetensors`` or torch's, or, if the name has no suffix, a new
folder for ``timm.create_model("local-dir:FOLDER")``.
"""

import argparse
import errno
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import clean_state_dict, save_for_hf
from torch import nn

from common.checkpoints import read_checkpoint
from common.command_parser import CommandParser
from common.files import tensor_files
from common.files.output_files import check_new, new_path

from . import models
from .named_values import NamedValues

#: Keys of averaged and of plain weights in timm's checkpoints; the first one present counts.
_AVERAGED, _PLAIN = ("state_dict_ema", "model_ema"), ("state_dict", "model")
#: Suffixes of the files that ``write`` makes; all but the first are torch's.
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
logger = logging.getLogger("timm_plugin")


def convert(name: str, source: Path, model_args: dict[str, Any], use_ema: bool = False) -> nn.Module:
    """The model ``name`` with the weights of ``source``; logs which weights are used, left out and new.

    It has the classes and image channels of ``source`` unless ``model_args`` say otherwise. ``use_ema``: as in
    ``read_weights``.

    Raises:
        ValueError: a file that cannot be read, or of a model that does not fit; a ``name`` that is not ours.
    """
    models_here = [model for model in timm.list_models() if _is_ours(model)]
    if name not in models_here:
        raise ValueError(f"the model is {name!r}; allowed: {', '.join(models_here)}")
    state_dict = read_weights(source, use_ema)
    overlay: dict[str, Any] = {"state_dict": state_dict}
    classes = size_of_head(state_dict)
    if classes is not None:
        overlay["num_classes"] = classes
    stem = state_dict.get("patch_embed.proj.weight", state_dict.get("patch_embed.0.proj.weight"))
    if stem is not None:
        overlay["input_size"] = (stem.shape[1], *timm.get_pretrained_cfg(name).input_size[1:])
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **model_args)


def _is_ours(name: str) -> bool:
    return timm.models.model_entrypoint(name).__module__.startswith(f"{models.__name__}.")


def read_weights(source: Path, use_ema: bool = False) -> dict[str, Any]:
    """The tensors of a checkpoint, read without running code of the file.

    Args:
        use_ema: return the averaged weights of ``--model-ema``, as validate.py's ``--use-ema`` does; else the plain
            ones, or the averaged ones if there are no others. If there are both, a warning says which are used.

    Raises:
        ValueError: a file that cannot be read, or with ``use_ema`` one without averaged weights.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):  # train.py stores its arguments this way
        checkpoint = read_checkpoint(source)
    averaged, plain = (
        next((name for name in names if isinstance(checkpoint.get(name), dict)), None) for names in (_AVERAGED, _PLAIN)
    )
    if use_ema and averaged is None:
        raise ValueError(f"--use-ema is given, and {source} has no averaged weights; allowed: without --use-ema")
    key = averaged if use_ema or plain is None else plain
    if averaged and plain:
        kind, other = ("averaged", "without") if use_ema else ("plain", "with")
        logger.warning(f"{source}: its {kind} weights are taken ({key}); {other} --use-ema the others")
    return clean_state_dict(checkpoint if key is None else checkpoint[key])


def size_of_head(state_dict: dict[str, Any]) -> int | None:
    """The number of classes of the model of ``state_dict``; None if it has no head, or an unknown one."""
    head = state_dict.get("head.weight", state_dict.get("head.fc.weight"))
    return None if head is None else len(head)


def save(model: nn.Module, target: Path) -> None:
    """Write ``model`` to a new file or, if the name has no suffix, a new folder; completely or not at all.

    Raises:
        ValueError: a file or folder of this name exists.
        OSError: it cannot be written, for example on a full disk.
    """
    with new_path(target, "target") as part:
        write(model, part)


def check_suffix(path: Path, argument: str) -> None:
    """Raise ValueError for the suffix of a format that ``write`` does not support."""
    if path.suffix and path.suffix not in _SUFFIXES:
        raise ValueError(f"{argument} is {path}, a file in a format of {path.suffix}; allowed: {', '.join(_SUFFIXES)}")


def write(model: nn.Module, path: Path) -> None:
    """Write ``model`` to ``path``, in the format of its suffix, or as a folder without one. OSError if that fails."""
    try:
        if not path.suffix:
            save_for_hf(model, path, safe_serialization=True)
        elif path.suffix == ".safetensors":
            save_file(model.state_dict(), path)
        else:
            tensor_files.save({"state_dict": model.state_dict()}, path)
    except SafetensorError as error:  # not an OSError, and without the file's name
        raise OSError(errno.EIO, str(error), str(path)) from error


def main(arguments: Sequence[str]) -> None:
    """Convert a file; if that fails, exit with one line and write nothing."""
    parser = CommandParser(prog="python -m timm_plugin.convert", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="name of a model of lineartime")
    parser.add_argument("source", type=Path, help="checkpoint to start from")
    parser.add_argument("target", type=Path, help="new file to write, or a name without a suffix for a folder")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=NamedValues, help="as in timm's train.py")
    parser.add_argument("--use-ema", action="store_true", help="the averaged weights of a checkpoint of --model-ema")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with parser.one_line_errors(RuntimeError, TypeError):  # TypeError: an unknown name in --model-kwargs
        check_suffix(options.target, "target")  # before the slow part
        check_new(options.target, "target")
        save(convert(options.model, options.source, options.model_kwargs, options.use_ema), options.target)
    print(f"{options.target}: {options.model}")


if __name__ == "__main__":
    main(sys.argv[1:])
