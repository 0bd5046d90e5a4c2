"""The folder of a command that goes on where it was: its own, of one run at a time, in which strangers' files are safe.

Every file in it is written through ``own_file``, or is claimed before; see ``common.output_files``.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.output_files import MARK, Mark, check_folder, find_stranger, naming, new_path, take

#: The folders in which this process works, by path.
_taken: dict[Path, Mark] = {}
_changing = threading.Lock()


@contextlib.contextmanager
def working_folder(
    path: Path, command: str, argument: str = "--out", whole: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Take the folder ``path``, or go on in it, for as long as the block lasts. One below such a folder is of it.

    Args:
        command: the module whose folder it is.
        argument: that names the folder, for messages.
        whole: folders in it that the command is going to replace, and who writes them; see ``new_folder``.

    Raises:
        ValueError: the folder is neither new nor empty nor of ``command``, or one of ``whole`` holds anything else.
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
        if find_stranger(mark.folder, [mark.folder / MARK]) is None:  # refused, or failed, before there was anything
            mark.close(remove=True)
            if new:
                with contextlib.suppress(OSError):
                    mark.folder.rmdir()
        mark.close()


def claim(path: Path) -> Path:
    """Say that this command makes ``path``, before it does; returns it.

    Raises:
        ValueError: there is a file, folder or link that it did not make. Outside of a working folder, that is any.
    """
    place = Path(os.path.realpath(path.parent)) / path.name
    mark = _mark_of(path)
    with _changing:
        if os.path.lexists(place) and (place.is_symlink() or mark is None or not mark.has(place)):
            raise ValueError(f"{path} is there, and is not of this command; allowed: to move it elsewhere first")
        if mark is not None:
            mark.note(place)
    return path


@contextlib.contextmanager
def own_file(path: Path) -> Iterator[Path]:
    """Yield a path under which the file ``path`` is written until it is whole; after an error there is neither.

    An earlier ``path`` of this command stays until then.

    Raises:
        ValueError: see ``claim``.
    """
    if _mark_of(path) is None:
        with new_path(path, "the file to write") as part:
            yield part
        return
    part = unfinished_path(claim(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    claim(part)
    try:
        with naming(path):
            yield part
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file of this command, whole or not at all; see ``own_file``."""
    with own_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def unfinished_path(path: Path) -> Path:
    """The path under which a file is written before it is whole."""
    return path.with_name(path.name + ".part")


def remove_own(path: Path) -> None:
    """Remove the file ``path``, or the folder with what is in it, as far as this command made it."""
    mark = _mark_of(path)
    place = Path(os.path.realpath(path.parent)) / path.name
    made = mark.made() if mark else set()
    for one in sorted((one for one in made if one == place or place in one.parents), reverse=True):
        if one.is_symlink() or Path(os.path.realpath(one.parent)) != one.parent:  # by a link or "..", it is elsewhere
            continue
        if one.is_dir():
            with contextlib.suppress(OSError):  # not empty: a stranger's file is in it
                one.rmdir()
        else:
            one.unlink(missing_ok=True)
        if not one.exists():
            mark.forget(one)


def _mark_of(path: Path) -> Mark | None:
    """The folder in which this process works and ``path`` lies, or is."""
    place = Path(os.path.realpath(path.parent)) / path.name
    return next((_taken[one] for one in (Path(os.path.realpath(path)), *place.parents) if one in _taken), None)
