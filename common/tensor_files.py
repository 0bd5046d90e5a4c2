"""Tensors on disk, written by torch or as safetensors; see ``checkpoints`` for reading what torch wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save(content: Any, path: Path) -> None:
    """``torch.save`` to ``path``.

    Raises:
        OSError: it cannot be written, as on a full disk, where torch itself speaks of its positions in the file.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` and texts about them to ``path`` in the format of safetensors.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save as to_bytes

    apart = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}  # none shares memory
    with open(path, "wb") as file:
        file.write(to_bytes(apart, dict(metadata)))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on the CPU, and the texts in a file of safetensors. Nothing of it is run.

    Raises:
        ValueError: no such file, one that is cut short, or of another format.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; allowed: a file of safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except Exception as error:  # its reader raises what it likes for a broken file
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{str(path)!r} cannot be read ({reason}); allowed: a whole file of safetensors") from error
