"""The files of a Hugging Face folder: config.json, and tensors in one file or in several with an index."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.checkpoints import listed, read_checkpoint
from common.files import json_files
from common.ops.shared.checks import shortened

ALLOWED = (
    "the folder of a BERT, RoBERTa or GPT-2, with config.json, model.safetensors (or parts of it and their index, or "
    "pytorch_model.bin) and its tokenizer's files"
)
#: Files of tensors, the preferred one first; an index has the further suffix ``_INDEX``.
_TENSORS = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"


def read_object(path: Path) -> dict[str, Any]:
    """The object of JSON in the file ``path``.

    Raises:
        ValueError: the file is missing or damaged, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; allowed: {ALLOWED}")
    content = json_files.read(path, ALLOWED)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no object of JSON; allowed: {ALLOWED}")
    return content


def check_entries(path: Path, content: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise ValueError unless each entry of ``content``, read from ``path``, is absent, null or as ``allowed``.

    A tuple in ``allowed`` has several allowed values.
    """
    for name, value in allowed.items():
        choices = value if isinstance(value, tuple) else (value,)
        if content.get(name) is not None and content[name] not in choices:
            words = ", ".join(choice if isinstance(choice, str) else repr(choice) for choice in choices)
            raise ValueError(f"{path} has the {name} {shortened(content[name])}; allowed: {words}")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU; numbers of lower precision become float32.

    Raises:
        ValueError: there is no file of tensors, one of several is missing, a file is damaged, would run code, or holds
        something else.
    """
    for name in _TENSORS:
        if (folder / name).is_file():
            return _checked(folder / name, read_checkpoint(folder / name))
        if (folder / f"{name}{_INDEX}").is_file():
            return _read_parts(folder / f"{name}{_INDEX}")
    raise ValueError(f"{folder} has no {' and no '.join(_TENSORS)}; allowed: {ALLOWED}")


def _read_parts(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that ``index`` lists."""
    file_of = json_files.typed(read_object(index).get("weight_map"), dict[str, str], f"{index}: weight_map")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(file_of.values())):
        path = index.parent / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"{index} lists the file {name:.100}, which is not in that folder; allowed: {ALLOWED}")
        tensors |= _checked(path, read_checkpoint(path))
    missing = [name for name in file_of if name not in tensors]
    if missing:
        raise ValueError(f"the files that {index} lists lack {len(missing)} tensors{listed(missing)}; allowed: all")
    return tensors


def _checked(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    others = [str(name) for name, x in content.items() if not isinstance(name, str) or not isinstance(x, Tensor)]
    if others:
        raise ValueError(f"{path} holds {len(others)} entries that are no tensors{listed(others)}; allowed: {ALLOWED}")
    return {name: x.to(torch.float32) if x.is_floating_point() else x for name, x in content.items()}


def check_table(folder: Path, tensors: Mapping[str, Tensor], name: str, rows: int | None, width: int) -> Tensor:
    """The table ``name`` (rows, width) of ``tensors``; any number of rows, at least one, if ``rows`` is None.

    Raises:
        ValueError: it is missing, or has another shape than config.json says.
    """
    if name not in tensors:
        raise ValueError(f"the tensors in {folder} lack {name}; allowed: {ALLOWED}")
    shape = tuple(tensors[name].shape)
    if len(shape) != 2 or shape[1] != width or shape[0] != (rows or max(shape[0], 1)):
        raise ValueError(
            f"{name} in {folder} has the shape {shape}; allowed: ({rows or 'any'}, {width}), by config.json"
        )
    return tensors[name]


def without_prefix(tensors: Mapping[str, Tensor], prefixes: Collection[str]) -> dict[str, Tensor]:
    """``tensors`` without the first of ``prefixes`` that their names have: a model alone has none, with a head one."""
    shortened_names = {}
    for name, x in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        shortened_names[name.removeprefix(prefix)] = x
    return shortened_names
