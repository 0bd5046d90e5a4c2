"""Small JSON files in which a command stores its results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.files import json_files
from common.files.json_files import signed, typed

from .working_folder import write_text

Kind = TypeVar("Kind")
_ALLOWED = "what the command wrote there; without the file it is made anew"


def read_json(path: Path, allowed: str = _ALLOWED, **kinds: Any) -> dict[str, Any]:
    """The object in a file that a command wrote, with at least the names and types of ``kinds``; see ``typed``.

    Raises:
        ValueError: the file is missing or damaged; the message says what is ``allowed``.
    """
    content = json_files.read(path, allowed)
    missing = [name for name in kinds if name not in content] if isinstance(content, dict) else ["object"]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}; allowed: {allowed}")
    return {name: _as(value, kinds.get(name, Any), path, allowed, name) for name, value in content.items()}


def read_record(path: Path, kind: type[Kind], allowed: str = _ALLOWED) -> Kind:
    """The NamedTuple or dataclass ``kind`` in a file that a command wrote.

    Raises:
        ValueError: see ``read_json``.
    """
    content = json_files.read(path, allowed)
    if not content:
        raise ValueError(f"{path} holds nothing; allowed: {allowed}")
    return _as(content, kind, path, allowed)


def _as(found: Any, kind: Any, path: Path, allowed: str, what: str = "it") -> Any:
    try:
        return typed(found, kind, what)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error} ({allowed})") from error


def as_json(content: dict[str, Any]) -> str:
    """``content`` with a checksum, as the text of a file."""
    return json.dumps(signed(content), indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of this command, completely or not at all; see ``atomic_write``."""
    write_text(path, as_json(content))


def measured(path: Path, measure: Callable[[], dict[str, Any]], kind: Any) -> Any:
    """The result of ``measure`` as ``kind``, stored at ``path`` so that it is measured once; see ``read_record``."""
    if not path.exists():
        write_json(path, measure())
    return read_record(path, kind)
