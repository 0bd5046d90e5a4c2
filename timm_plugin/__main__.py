"""``python -m timm_plugin SCRIPT ARGUMENTS...``: run one of timm's scripts, as it is, with the plugin imported.

For the scripts that cannot import a plugin themselves: validate.py, inference.py, benchmark.py, onnx_export.py.
(train.py can: ``--device-modules timm_plugin``.) Also ``torchrun --nproc_per_node 2 -m timm_plugin train.py ...``, on
CPUs too, where train.py by itself fails for every model, timm's own included.

If the script creates a timm model with ``attn_layer=flow`` or another of our mechanisms, layers that need the model's
grid get it, and a model that does not use the mechanism is refused. Refusals of the plugin and a missing GPU end with
one line and status 2; the latter before the script begins, where ``--device`` shows it. Everything else on the command
line is read by the script's own parser alone.
"""

import functools
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.models
import timm.task
import torch
from torch import nn

from .create import asks_for_ours, create_model
from .layers.layer_spec import check_attn_layer

USAGE = "usage: python -m timm_plugin SCRIPT [ARGUMENTS...]"
#: Packages whose ValueErrors are about a user's input.
_PACKAGES = ("common", "timm_plugin")
#: Messages of timm and torch where there is no GPU.
_NO_CUDA = re.compile(r"CUDA is not available|not compiled with CUDA|no NVIDIA driver|No CUDA GPUs", re.IGNORECASE)
#: How timm's scripts declare their option in the source; a script of the user may compute on a CPU by default.
_DEFAULT_IS_CUDA = re.compile(r"""add_argument\(\s*['"]--device['"],\s*default=['"]cuda""")


def main(arguments: list[str]) -> None:
    """Run the script ``arguments[0]`` as ``__main__`` with the rest as its arguments, untouched.

    Raises:
        SystemExit: whatever the script exits with; 2 if no script is named, it is not a file, the plugin refuses the
            user's input, or the script needs a GPU that is missing.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"{USAGE}\ntimm_plugin: no such file: {script!r}", file=sys.stderr)
        raise SystemExit(2)
    _check_device(script, arguments[1:])
    sys.argv = arguments
    _set_import_path(script)
    _allow_processes_on_cpus()
    _check_attention_of_models()
    try:
        runpy.run_path(script, run_name="__main__")
    except (ValueError, AssertionError, RuntimeError) as error:
        if (message := _in_words(error)) is None:
            raise
        print(f"timm_plugin: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def _check_device(script: str, options: list[str]) -> None:
    """Refuse a script of timm that would compute with CUDA where there is none, before it does any work.

    By itself validate.py finds out after it has loaded a model, and benchmark.py after it has tried smaller batches.

    Raises:
        SystemExit: 2, after one line on stderr.
    """
    if torch.cuda.is_available() or not _DEFAULT_IS_CUDA.search(Path(script).read_text("utf-8", errors="replace")):
        return
    if (device := _device(options)).startswith("cuda"):
        print(f"timm_plugin: there is no CUDA here, add --device cpu (--device is {device})", file=sys.stderr)
        raise SystemExit(2)


def _device(options: list[str]) -> str:
    """The value of ``--device``, or of an abbreviation that argparse accepts; "" if only the script can know it."""
    device = "cuda, the default"
    for word, following in zip(options, [*options[1:], ""]):
        name, _, value = word.partition("=")
        if name in ("-h", "--help", "-c", "--config"):  # nothing is computed, or a file of settings names the device
            return ""
        if len(name) > 2 and "--device".startswith(name):
            device = value or following
    return device


def _in_words(error: Exception) -> str | None:
    """The message for a refusal of the plugin or a missing GPU; None for other errors."""
    if isinstance(error, ValueError):
        *_, last = traceback.walk_tb(error.__traceback__)
        return str(error) if last[0].f_globals.get("__name__", "").partition(".")[0] in _PACKAGES else None
    if torch.cuda.is_available() or not _NO_CUDA.search(str(error)):
        return None
    return f"there is no CUDA here, add --device cpu ({str(error).splitlines()[0]})"


def _check_attention_of_models() -> None:
    """Replace timm's ``create_model``, before the script is imported, by one that checks ``attn_layer``."""
    for module in (timm, timm.models):
        module.create_model = _checking(module.create_model)


def _checking(timms: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(timms)
    def create(model_name: str, *positional: Any, **arguments: Any) -> nn.Module:
        attn_layer = arguments.get("attn_layer")
        if asks_for_ours(attn_layer):
            return create_model(model_name, *positional, **arguments)
        try:
            return timms(model_name, *positional, **arguments)
        except AssertionError as error:
            if str(error).startswith("Unknown attn_layer"):  # timm's message lacks the name
                check_attn_layer(attn_layer)
            raise

    return create


def _set_import_path(script: str) -> None:
    """Set sys.path as Python does for ``script``, with the plugin's own root at the end."""
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    root = str(Path(__file__).resolve().parents[1])
    if root not in (os.path.realpath(entry) for entry in sys.path):
        sys.path.append(root)  # a dataloader's workers may be new interpreters, which inherit this path


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
