"""Files that a command writes. Nothing is replaced or removed but what the command made itself.

How that is known: each folder in which a command works has a file ``.lineartime``, which names the command and every
file that it made there. The names alone would not do: a ``train.npz`` may be the user's. What lies in the folder and is
not named, a symbolic link too, is a stranger, and ``find_stranger`` decides that for all commands.

Unfinished work on NAME lies in the folder ``NAME.part``, which has such a file, too, and is locked while it is at work.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from .folder_locks import lock

#: The file that names a command and what it made.
MARK = ".lineartime"
#: Where a folder has no command of its own.
_UNFINISHED = "unfinished work"
#: Folders in one for unfinished work: what is written, what it is about to replace, and what it has replaced.
_PARTS = ("new", "old", "gone")


def find_stranger(path: Path, made: Collection[Path] = ()) -> Path | None:
    """The first file, link or folder at or below ``path`` that is not in ``made``, else None.

    A link is never in ``made``, since no command makes links. ``path`` itself is allowed to be a folder.
    """
    if path.is_symlink():
        return path
    if not path.is_dir():
        return path if path.exists() and path not in made else None
    for child in sorted(path.iterdir()):
        if child not in made or (found := find_stranger(child, made)) == child:
            return child
        if found is not None:
            return found
    return None


def real_folder(path: Path, argument: str) -> Path:
    """The folder that ``path`` names, itself no link, whether it is there or not.

    Raises:
        ValueError: there is a file, or a link that leads nowhere.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{argument} is {path}, a link to {os.readlink(path)}, which is not there; allowed: a folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{argument} is {path}, which is a file; allowed: a new folder, or one of this command")
    return Path(os.path.realpath(path))


def check_new(path: Path, argument: str) -> None:
    """Raise ValueError if there is anything at ``path``."""
    if os.path.lexists(path):
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"
        raise ValueError(f"{argument} is {path}, {kind} that is there already; allowed: a name that is not")


def check_folder(folder: Path, command: str, argument: str, whole: bool) -> None:
    """Raise ValueError unless ``folder`` is absent, empty or one of ``command``; see ``real_folder``, too.

    With ``whole`` it must hold nothing but what the command made, because it is going to be replaced.
    """
    folder = real_folder(folder, argument)
    if whole and os.path.ismount(folder):
        raise ValueError(f"{argument} is {folder}, a mount point, which cannot be replaced; allowed: a folder below it")
    allowed = f"a new or empty folder, or one of {command}" + (" with nothing else in it" if whole else "")
    mark = folder / MARK
    noted = None if find_stranger(mark, [mark]) else _read(mark)
    made = {folder / name for name in noted[1]} | {mark} if noted else set()
    if noted and noted[0] not in ("", command):  # empty: its process was killed before it had written more
        raise ValueError(f"{argument} is {folder}, a folder of {noted[0]}; allowed: {allowed}")
    if whole or noted is None:
        stranger = find_stranger(folder, made)
        if stranger is not None:
            raise ValueError(
                f"{argument} is {folder}, which holds {stranger.relative_to(folder)}, which no {MARK} lists as "
                "made by this command; "
                f"allowed: {allowed}"
            )


class Mark:
    """The file ``.lineartime`` of a folder, open and locked: the command of the folder, and what it made there."""

    def __init__(self, folder: Path, file: IO[bytes], made: set[Path]) -> None:
        self.folder, self._file, self._made = folder, file, made

    def made(self) -> set[Path]:
        """Paths that the command made, including those that its forked processes made."""
        noted = _read(self.folder / MARK)
        self._made = {self.folder / name for name in noted[1]} if noted else set()
        return self._made

    def has(self, path: Path) -> bool:
        """Whether ``path`` was made by the command."""
        return path in self._made or path in self.made()

    def note(self, path: Path) -> None:
        """Write down that the command makes ``path``; before it does."""
        if path not in self._made:
            self._write(path.relative_to(self.folder).as_posix())
            self._made.add(path)

    def forget(self, path: Path) -> None:
        """Write down that ``path`` is no longer there."""
        self._write({"gone": path.relative_to(self.folder).as_posix()})
        self._made.discard(path)

    def close(self, remove: bool = False) -> None:
        """Release the folder; with ``remove`` the file goes, too."""
        if remove:
            try:
                (self.folder / MARK).unlink(missing_ok=True)
            except PermissionError:  # Windows removes no open file
                self._file.close()
                with contextlib.suppress(OSError):
                    (self.folder / MARK).unlink()
        self._file.close()

    def _write(self, entry: object) -> None:
        path = self.folder / MARK
        line = (json.dumps(entry) + "\n").encode()
        with naming(path):
            if self._file.write(line) < len(line):  # the disk is full
                _cut(path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def take(folder: Path, command: str, argument: str) -> Mark:
    """Make ``folder`` one of ``command``, or take it again, and lock it until ``Mark.close`` or the process's end.

    Raises:
        ValueError: it is not absent, empty or the command's.
        FolderInUse: another process has taken it.
    """
    folder = real_folder(folder, argument)
    path = folder / MARK
    while True:
        check_folder(folder, command, argument, whole=False)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o666)
        file = open(descriptor, "ab", buffering=0)
        try:
            os.set_inheritable(descriptor, True)  # a training that outlives its command goes on holding the folder
            lock(file, folder)
            # Whoever held it may have removed or moved it.
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.close()
                continue
            _cut(path)
            noted = _read(path)
            mark = Mark(folder, file, {folder / name for name in noted[1]} if noted else set())
            if noted is None or not noted[0]:
                mark._write({"command": command})
            return mark
        except BaseException:
            file.close()
            raise


@contextlib.contextmanager
def unfinished(path: Path, command: str = _UNFINISHED, keep: bool = False) -> Iterator[Path]:
    """Yield ``path``.part/new/NAME, where ``path`` is written until it is whole; at the end ``path``.part goes.

    What a run that was killed left there is removed before; a folder that it was just replacing is put back. With
    ``keep`` what is unfinished stays, for the next run to go on with.

    Raises:
        ValueError: ``path``.part holds anything else.
        FolderInUse: another process is at it.
        OSError: what lies there cannot be removed.
    """
    part = path.with_name(path.name + ".part")
    new, old = part / "new" / path.name, part / "old" / path.name
    mark = take(part, command, f"the folder for unfinished work on {path.name}")
    try:
        for child in part.iterdir():
            if child.name not in (MARK, *_PARTS) or child.is_symlink():
                raise ValueError(f"{part}, which holds unfinished work, holds {child.name}, too; allowed: that alone")
        _put_back(old, path)
        _remove(part, [*_PARTS] if not keep else ["old", "gone"])
        new.parent.mkdir(exist_ok=True)
        with naming(path):
            yield new
    finally:
        _put_back(old, path)  # after an error between the two steps
        if not (keep and new.exists()):
            with contextlib.suppress(OSError):  # the next run says what cannot be removed
                _remove(part, _PARTS)
                mark.close(remove=True)
                part.rmdir()  # not if it is not empty: something came in meanwhile
        mark.close()


def _put_back(old: Path, path: Path) -> None:
    """Put a folder back that was moved away to be replaced, and was not."""
    if old.exists() and not os.path.lexists(path):
        old.rename(path)


def _remove(part: Path, names: Collection[str]) -> None:
    """Remove folders of unfinished work; one that was replaced gets another name first, as it is no longer whole."""
    if (part / "old").exists():
        _remove_all(part / "gone")
        (part / "old").rename(part / "gone")
    for name in names:
        _remove_all(part / name)


def _remove_all(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:  # names a file by the last part of its path
        raise OSError(error.errno, f"{error.strerror}, so it cannot be removed", str(folder)) from error


@contextlib.contextmanager
def new_path(path: Path, argument: str) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which becomes ``path`` at the end, whole, or nothing.

    Raises:
        ValueError: there is something at ``path``, or in place of its unfinished work.
    """
    check_new(path, argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as new:
        yield new
        check_new(path, argument)
        new.rename(path)


@contextlib.contextmanager
def new_folder(path: Path, command: str, argument: str = "--out") -> Iterator[Path]:
    """Yield an empty folder to write into; it becomes ``path`` at the end, in place of an earlier one of ``command``.

    The earlier one stays until the new one is whole, and whoever ends the process, one of the two is there.

    Raises:
        ValueError: ``path`` is a folder that holds anything that the command did not make, or no folder, or this
            process works in it.
        FolderInUse: another process is writing it.
    """
    check_folder(path, command, argument, whole=True)
    folder = real_folder(path, argument)
    here = Path.cwd()
    if folder.exists() and (here == folder or folder in here.parents):
        raise ValueError(f"{argument} is {folder}, in which you are; allowed: a folder below it, or elsewhere")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(folder, command) as new:
        new.mkdir()
        yield new
        _describe(new, command)
        check_folder(folder, command, argument, whole=True)
        if folder.exists():
            old = new.parents[1] / "old" / folder.name
            old.parent.mkdir(exist_ok=True)
            folder.rename(old)
        new.rename(folder)


def _describe(folder: Path, command: str) -> None:
    """Write the file ``.lineartime`` of a folder that is complete."""
    (folder / MARK).unlink(missing_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    lines = [json.dumps({"command": command}), *map(json.dumps, names)]
    with open(folder / MARK, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _cut(mark: Path) -> None:
    """Remove a last line that is not whole: it names what was not yet made."""
    os.truncate(mark, mark.read_bytes().rfind(b"\n") + 1)


def _read(mark: Path) -> tuple[str, set[str]] | None:
    """The command and the names in a file ``.lineartime``; None if there is none."""
    if not mark.is_file():
        return None
    command, names = "", set()
    try:
        for line in mark.read_text(encoding="utf-8").split("\n")[:-1]:
            entry = json.loads(line)
            if isinstance(entry, str):
                names.add(entry)
            elif "gone" in entry:
                names.discard(entry["gone"])
            else:
                command = entry["command"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{mark} cannot be read: {error}; allowed: the file that a command wrote there") from error
    return command, names


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put ``path`` into an OSError that names no file, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error
