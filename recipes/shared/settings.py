"""The settings with which a folder of results was begun, so that it never mixes results of different settings."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .download import file_sha256
from .json_files import read_json, write_json
from .working_folder import remove_own


def given(name: str, path: Path | str | None, patterns: Iterable[str] = ("**/*",)) -> dict[str, str | None]:
    """The name of a file or folder that a user gave, and the SHA-256 of its content, as settings of this ``name``.

    The content of a folder is that of its files that match ``patterns``; see ``folder_sha256``. Without such files the
    SHA-256 is None. Without a ``path`` the name is None, and there is no SHA-256.
    """
    if path is None:
        return {name: None}
    path = Path(path)
    return {name: path.name, f"{name}_sha256": _sha256(path, patterns)}


def _sha256(path: Path, patterns: Iterable[str]) -> str | None:
    if path.is_file():
        return file_sha256(path)
    files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    return folder_sha256(path, files) if files else None


def folder_sha256(folder: Path, files: Iterable[Path]) -> str:
    """The SHA-256 of the contents of ``files`` and of their paths in ``folder``: those of images have their classes."""
    lines = (f"{file.relative_to(folder).as_posix()} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Compare ``settings`` with those in the file ``path``, if there is one.

    Raises:
        ValueError: a setting differs; the message has its name and both values.
    """
    if not path.exists():
        return
    stored = read_json(path)
    current = json.loads(json.dumps(settings))  # tuples and paths as they would be read back
    for name in sorted({*stored, *current}):
        if stored.get(name) != current.get(name) or (name in stored) != (name in current):
            raise ValueError(
                f"{name:.100} is {_shown(current, name)}; allowed in {path.parent}: {_shown(stored, name)}, with which "
                "it was begun, or choose another folder"
            )


def keep_settings(path: Path, settings: dict[str, Any]) -> None:
    """``check_settings``, then write the settings if ``path`` does not exist."""
    check_settings(path, settings)
    if not path.exists():
        write_json(path, settings)


@contextlib.contextmanager
def begun_with(path: Path, settings: dict[str, Any], made: Iterable[str]) -> Iterator[None]:
    """``keep_settings`` for a block that makes the files and folders with the names ``made`` next to ``path``.

    If the settings are new and the block refuses them with a ValueError, they are removed with what it made, so that
    the folder can be begun with others.

    Raises:
        ValueError: see ``check_settings``.
    """
    new = not path.exists()
    keep_settings(path, settings)
    try:
        yield
    except ValueError:
        if new:
            for name in (*made, path.name):
                remove_own(path.with_name(name))
        raise


def _shown(settings: dict[str, Any], name: str) -> str:
    if name not in settings:
        return "not given"
    return "given" if settings[name] == "" else f"{settings[name]!s:.300}"
