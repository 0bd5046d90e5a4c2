"""Small files of JSON in which a command keeps what it found out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .working_folder import write_text


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """The object in a file that this command wrote, with at least ``names`` in it.

    Raises:
        ValueError: it is damaged.
    """
    allowed = "what the command wrote there; without the file it is made anew"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {allowed}") from error
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise ValueError(f"{path} has no {', '.join(names) or 'object'}; allowed: {allowed}")
    return found


def write_json(path: Path, content: Any) -> None:
    """Write a file of this command, whole or not at all; see ``own_file``."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def measured(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` says, kept at ``path``, so that it is measured once."""
    if not path.exists():
        write_json(path, measure())
    return read_json(path)
