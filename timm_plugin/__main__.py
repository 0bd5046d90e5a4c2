"""``python -m timm_plugin SCRIPT ARGUMENTS...``: run one of timm's scripts, as it is, with the plugin imported.

For the scripts that cannot import a plugin themselves: validate.py, inference.py, benchmark.py, onnx_export.py.
(train.py can: ``--device-modules timm_plugin``.) Also ``torchrun --nproc_per_node 2 -m timm_plugin train.py ...``, on
CPUs too, where train.py by itself fails for every model, timm's own included.

``--model-kwargs attn_layer=flow`` for a model of timm that does not use it is an error before the script starts.
"""

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.task
import torch
import yaml
from timm.utils import ParseKwargs

from common.attention import ATTENTIONS

from .create import create_model

USAGE = "usage: python -m timm_plugin SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> None:
    """Run the script ``arguments[0]`` as ``__main__`` with the rest as its arguments, untouched.

    Raises:
        SystemExit: whatever the script exits with; 2 when no script is named, it is not a file, or ``--model-kwargs
            attn_layer=...`` names attention of ours for a model that does not use it, or that is not in timm's table.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"{USAGE}\ntimm_plugin: no such file: {script!r}", file=sys.stderr)
        raise SystemExit(2)
    _check_attn_layer(arguments[1:])
    sys.argv = arguments
    _set_import_path(script)
    _allow_processes_on_cpus()
    runpy.run_path(script, run_name="__main__")


def _check_attn_layer(arguments: list[str]) -> None:
    """Exit with 2 where timm's scripts are asked for attention of ours in a model that would not use it."""
    parser = argparse.ArgumentParser(prog="timm_plugin", add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config")
    parser.add_argument("-m", "--model")
    parser.add_argument("--model-kwargs", nargs="*", action=ParseKwargs)
    given, _ = parser.parse_known_args(arguments)
    if given.config and os.path.isfile(given.config):  # the script says that a file is missing
        with open(given.config) as file:
            defaults = yaml.safe_load(file)
        parser.set_defaults(**{name: defaults[name] for name in ("model", "model_kwargs") if name in defaults})
        given, _ = parser.parse_known_args(arguments)
    model_args = given.model_kwargs or {}
    if given.model is None or model_args.get("attn_layer") not in tuple(ATTENTIONS):
        return
    try:
        with torch.device("meta"):
            create_model(given.model, **model_args)
    except ValueError as error:
        print(f"timm_plugin: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _set_import_path(script: str) -> None:
    """sys.path as Python sets it for ``script``; where the plugin itself came from stays reachable, at the end."""
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    root = str(Path(__file__).resolve().parents[1])
    if root not in (os.path.realpath(entry) for entry in sys.path):
        sys.path.append(root)  # a dataloader's workers may be new interpreters, which take over this path


def _allow_processes_on_cpus() -> None:
    """Let timm's training tasks wrap a model on CPUs in DistributedDataParallel.

    train.py gives them ``device_ids=[cpu]``; DistributedDataParallel wants None there.
    """
    for task in [value for value in vars(timm.task).values() if isinstance(value, type)]:
        if "prepare_distributed" in vars(task):
            task.prepare_distributed = _without_cpus(task.prepare_distributed)


def _without_cpus(prepare: Callable) -> Callable:
    @functools.wraps(prepare)
    def prepare_distributed(self: Any, device_ids: list[Any] | None = None, **ddp_args: Any) -> Any:
        on_cpus = device_ids and all(getattr(device, "type", None) == "cpu" for device in device_ids)
        return prepare(self, device_ids=None if on_cpus else device_ids, **ddp_args)

    return prepare_distributed


if __name__ == "__main__":
    main(sys.argv[1:])
