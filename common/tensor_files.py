"""Tensors on disk, written by torch; see ``checkpoints`` for reading."""

from pathlib import Path
from typing import Any

import torch


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
