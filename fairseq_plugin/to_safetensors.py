"""``python -m fairseq_plugin.to_safetensors CHECKPOINT FOLDER --dict FILE``: a language model without pickled files.

``FOLDER`` gets the weights as safetensors, the configuration as JSON, and the dictionary. ``from_pretrained("FOLDER")``
loads it, and ``python -m fairseq_plugin.from_safetensors`` makes a checkpoint for fairseq's commands of it. What only a
training needs is left out: optimizer, schedule, distribution and paths.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor

from common.checkpoints import read_checkpoint
from common.command_parser import CommandParser
from common.files.json_files import signed
from common.files.output_files import new_path
from common.files.tensor_files import save_safetensors

from .loading.checkpoint_config import check_configuration, check_files
from .loading.checkpoints import stored_architecture
from .loading.configuration_errors import configuration_errors
from .loading.safetensors_folder import CONFIG, DICTIONARY, WEIGHTS, StoredConfig
from .models._language_model import LinearTimeLanguageModel

#: The groups of fairseq's configuration that are kept; the others describe a training and its machine.
_GROUPS = ("model", "task", "dataset", "generation", "tokenizer", "bpe")
#: Options of a task that are places on a machine; the data are in the folder itself.
_PLACES = {"data": ".", "plasma_path": ""}
_EMBEDDING = "decoder.embed_tokens.weight"
_ONE_OF_OURS = "one of a language model of this plugin, NAME_lm, as fairseq-train writes it"


def write_folder(checkpoint: Path, dictionary: Path, folder: Path, half: bool = False) -> str:
    """Write the language model in ``checkpoint``, a file of fairseq-train, to ``folder``, which exists and is empty.

    Args:
        dictionary: ``dict.txt`` of the data that it was trained on.
        half: store weights in half precision, in half of the bytes; they are rounded to 11 bits.

    Returns:
        the name of the model's architecture.

    Raises:
        ValueError: a file cannot be read or belongs to another kind of model; the dictionary has another number of
            symbols than the model; the configuration names files; with ``half``, a weight is too large.
    """
    state = read_checkpoint(checkpoint)
    architecture = stored_architecture(state, str(checkpoint))
    model = ARCH_MODEL_REGISTRY.get(architecture)
    if model is None or not issubclass(model, LinearTimeLanguageModel):
        raise ValueError(f"the checkpoint {str(checkpoint)!r} is of --arch {architecture}; allowed: {_ONE_OF_OURS}")
    config = _stored_config(state, str(checkpoint))
    check_configuration({**state, "cfg": config.cfg}, str(checkpoint))
    with configuration_errors(str(checkpoint)):
        check_files({**state, "cfg": config.cfg}, str(checkpoint), {})
    _check_dictionary(dictionary, state["model"])
    weights = {name: _halved(name, x) if half else x for name, x in state["model"].items()}
    save_safetensors(weights, folder / WEIGHTS, {})
    text = json.dumps(signed(config._asdict()), indent=1)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8", newline="\n")
    shutil.copyfile(dictionary, folder / DICTIONARY)
    return architecture


def _stored_config(state: Mapping[str, Any], path: str) -> StoredConfig:
    """The part of ``state`` for ``config.json``; ValueError unless its options are in groups that JSON can hold.

    Places on the training's machine are replaced; see ``_PLACES``.
    """
    config, history = state.get("cfg"), state.get("optimizer_history") or [{}]
    if state.get("args") is not None or not isinstance(config, Mapping):
        raise ValueError(f"the checkpoint {path!r} has no options in groups (cfg); allowed: {_ONE_OF_OURS}")
    with configuration_errors(path):
        groups = {name: config.get(name) for name in _GROUPS}
        groups["task"] = {name: _PLACES.get(name, value) for name, value in groups["task"].items()}
        json.dumps(groups, allow_nan=False)
        return StoredConfig(int(history[-1].get("num_updates", 0)), groups)


def _check_dictionary(path: Path, weights: Mapping[str, Any]) -> None:
    """Raise ValueError unless the dictionary at ``path`` has as many symbols as the model embeds."""
    if not path.is_file():
        raise ValueError(f"--dict is {str(path)!r}, which is no file; allowed: dict.txt of the training's data")
    try:
        symbols = len(Dictionary.load(str(path)))
    except Exception as error:  # fairseq raises a plain Exception for a file that is not UTF-8
        reason = str(error).splitlines()[0]
        raise ValueError(f"--dict is {str(path)!r}, no dictionary ({reason}); allowed: dict.txt") from error
    embedded = weights.get(_EMBEDDING)
    if isinstance(embedded, Tensor) and len(embedded) != symbols:
        raise ValueError(
            f"--dict is {str(path)!r} of {symbols:,} symbols; allowed: the dictionary of the training's data, of "
            f"{len(embedded):,}, fairseq's four included"
        )


def _halved(name: str, tensor: Tensor) -> Tensor:
    """``tensor`` in half precision if it has floating-point numbers; ValueError if one is too large for that."""
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not torch.isfinite(half).all():
        raise ValueError(f"{name} has numbers up to {tensor.abs().max():g}; allowed with --half: up to 65504")
    return half


def main(arguments: Sequence[str]) -> None:
    """Write a folder; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.to_safetensors", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="of a language model of this plugin, from fairseq-train")
    parser.add_argument("target", type=Path, help="new folder to write")
    parser.add_argument("--dict", type=Path, required=True, metavar="FILE", help="dict.txt of the training's data")
    parser.add_argument("--half", action="store_true", help="weights in half precision, in half of the bytes")
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        with new_path(options.target, "target") as new:
            new.mkdir()
            architecture = write_folder(options.checkpoint, options.dict, new, options.half)
    size = sum(path.stat().st_size for path in options.target.iterdir())
    print(f"{options.target}: {architecture}, {size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
