"""``python -m timm_plugin.convert MODEL SOURCE TARGET``: a checkpoint that starts MODEL, from one of another model.

SOURCE is a stock ViT or DeiT for ``flowformer_deit_*`` and ``daft_*``, the authors' released weights for
``flowformer_hier_s_12h``, or one of ours of another image size. TARGET is a file, ``.safetensors`` or torch's, or a
folder for ``timm.create_model("local-dir:FOLDER")``.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.utils import ParseKwargs
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)
from common.checkpoints import read_checkpoint


def convert(name: str, source: Path, model_args: Dict[str, Any]) -> nn.Module:
    """The model ``name`` with the weights of ``source``; what was taken, left out and new is logged.

    Raises:
        ValueError: a file that cannot be read, or of a model that does not fit.
    """
    state_dict = read_checkpoint(source)
    for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model"):  # timm's order
        if isinstance(state_dict.get(wrapper), dict):
            state_dict = state_dict[wrapper]
            break
    head = next((x for key, x in state_dict.items() if key in ("head.weight", "head.fc.weight")), None)
    overlay: Dict[str, Any] = {"state_dict": state_dict}
    if head is not None:
        overlay["num_classes"] = len(head)
        model_args = {"num_classes": len(head), **model_args}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **model_args)


def save(model: nn.Module, target: Path) -> None:
    """Write ``model`` to a file, whole or not at all, or into a folder as ``local-dir:`` wants it."""
    if not target.suffix:
        save_for_hf(model, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if target.suffix == ".safetensors":
        save_file(model.state_dict(), part)
    else:
        torch.save({"state_dict": model.state_dict()}, part)
    part.replace(target)


def main(arguments: Sequence[str]) -> None:
    """Convert a file; exits with one line where that cannot be done, and writes nothing then."""
    parser = argparse.ArgumentParser(prog="python -m timm_plugin.convert", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="name of a model of lineartime")
    parser.add_argument("source", type=Path, help="checkpoint to start from")
    parser.add_argument("target", type=Path, help="file to write, or folder")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs, help="as in timm's train.py")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        save(convert(options.model, options.source, options.model_kwargs), options.target)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    print(f"{options.target}: {options.model}")


if __name__ == "__main__":
    main(sys.argv[1:])
