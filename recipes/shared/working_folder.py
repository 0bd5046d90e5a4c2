"""The folder of a command that continues its work: used by one run at a time, and safe for files of others.

Every file in it is written through ``atomic_write`` or claimed before; see ``common.files.output_files``.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.files.output_files import MARK, Mark, check_folder, errors_name_path, find_untracked, new_path, take

#: Path -> mark of the folders in which this process works.
_taken: dict[Path, Mark] = {}
_changing = threading.Lock()


@contextlib.contextmanager
def working_folder(
    path: Path, command: str, argument: str = "--out", whole: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Lock the folder ``path``, new or of this command, during the block. A folder below a locked one belongs to it.

    Args:
        command: the module whose folder it is.
        argument: the option that gives the folder, for messages.
        whole: folders in it that the command will replace -> their writers; see ``new_folder``.

    Raises:
        ValueError: the folder is neither new, empty nor of ``command``, or one of ``whole`` has foreign files.
        FolderInUse: another process works in it.
    """
    with contextlib.ExitStack() as stack:
        if _mark_of(path) is None:
            stack.enter_context(_taking(path, command, argument))
        for name, writer in (whole or {}).items():
            check_folder(path / name, writer, argument, whole=True)
        yield


@contextlib.contextmanager
def _taking(path: Path, command: str, argument: str) -> Iterator[None]:
    new = not path.exists()
    mark = take(path, command, argument)
    _taken[mark.folder] = mark
    try:
        yield
    finally:
        del _taken[mark.folder]
        if find_untracked(mark.folder, [mark.folder / MARK]) is None:  # refused or failed before anything was written
            mark.close(remove=True)
            if new:
                with contextlib.suppress(OSError):
                    mark.folder.rmdir()
        mark.close()


def register(path: Path) -> Path:
    """Register ``path`` as made by this command, before it exists; returns it.

    Raises:
        ValueError: a file, folder or link exists that this command did not make; outside a working folder, any.
    """
    resolved = Path(os.path.realpath(path.parent)) / path.name
    mark = _mark_of(path)
    with _changing:
        if os.path.lexists(resolved) and (resolved.is_symlink() or mark is None or not mark.has(resolved)):
            raise ValueError(f"{path} is there, and is not of this command; allowed: to move it elsewhere first")
        if mark is not None:
            mark.note(resolved)
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the file ``path``, which is renamed when it is complete, and removed on an error.

    An earlier ``path`` of this command is kept until then.

    Raises:
        ValueError: see ``register``.
    """
    if _mark_of(path) is None:
        with new_path(path, "the file to write") as part:
            yield part
        return
    part = unfinished_path(register(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    register(part)
    try:
        with errors_name_path(path):
            yield part
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file of this command, completely or not at all; see ``atomic_write``."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def unfinished_path(path: Path) -> Path:
    """The temporary path of a file that is not complete."""
    return path.with_name(path.name + ".part")


def remove_own(path: Path) -> None:
    """Remove the file or folder ``path``, but only files and folders that this command made."""
    mark = _mark_of(path)
    resolved = Path(os.path.realpath(path.parent)) / path.name
    own_paths = mark.made() if mark else set()
    for entry in sorted((entry for entry in own_paths if entry == resolved or resolved in entry.parents), reverse=True):
        if entry.is_symlink() or Path(os.path.realpath(entry.parent)) != entry.parent:  # elsewhere, by a link or ".."
            continue
        if entry.is_dir():
            with contextlib.suppress(OSError):  # not empty: it has a foreign file
                entry.rmdir()
        else:
            entry.unlink(missing_ok=True)
        if not entry.exists():
            mark.forget(entry)


def _mark_of(path: Path) -> Mark | None:
    """The mark of the working folder of this process that is or contains ``path``; None if there is none."""
    resolved = Path(os.path.realpath(path.parent)) / path.name
    return next(
        (_taken[folder] for folder in (Path(os.path.realpath(path)), *resolved.parents) if folder in _taken), None
    )
