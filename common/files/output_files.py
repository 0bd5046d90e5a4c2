"""Files that a command writes. A command only replaces or removes files that it made itself.

Each folder in which a command works has a file ``.lineartime``, which lists the command and every file that it made
there. Fixed file names would not be enough: a ``train.npz`` may be the user's. Any other entry of the folder, including
symbolic links, is a stranger; ``find_untracked`` finds them for all commands.

Unfinished work on NAME is in the folder ``NAME.part``, which also has such a file and is locked while in use.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

from .folder_locks import lock

#: The file that lists a command and the files it made.
MARK = ".lineartime"
#: The command of folders that belong to no command.
_UNFINISHED = "unfinished work"
#: Subfolders for unfinished work: the new version, the old one during its replacement, and the old one to be removed.
_PARTS = ("new", "old", "gone")


def find_untracked(path: Path, made: Collection[Path] = ()) -> Path | None:
    """The first file, link or folder at or below ``path`` that is not in ``made``, else None.

    A link is never in ``made``, since no command makes links. ``path`` itself is allowed to be a folder.
    """
    if path.is_symlink():
        return path
    if not path.is_dir():
        return path if path.exists() and path not in made else None
    for child in sorted(path.iterdir()):
        if child not in made or (stranger := find_untracked(child, made)) == child:
            return child
        if stranger is not None:
            return stranger
    return None


def real_folder(path: Path, argument: str) -> Path:
    """The real path of the folder ``path``, which need not exist.

    Raises:
        ValueError: ``path`` is a file or a broken link.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{argument} is {path}, a link to {os.readlink(path)}, which is not there; allowed: a folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{argument} is {path}, which is a file; allowed: a new folder, or one of this command")
    return Path(os.path.realpath(path))


def check_new(path: Path, argument: str) -> None:
    """Raise ValueError if ``path`` exists, even as a broken link."""
    if os.path.lexists(path):
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"
        raise ValueError(f"{argument} is {path}, {kind} that is there already; allowed: a name that is not")


def check_in_folder(path: Path, argument: str, kind: str = "file") -> None:
    """Raise ValueError unless the folder of ``path``, a new ``kind``, exists."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{argument} is {str(path)!r}; allowed: a {kind} in a folder that exists")


def check_folder(folder: Path, command: str, argument: str, whole: bool) -> None:
    """Raise ValueError unless ``folder`` is absent, empty or made by ``command``; also as ``real_folder`` does.

    With ``whole`` it may only hold files that the command made, because it is going to be replaced.
    """
    folder = real_folder(folder, argument)
    if whole and os.path.ismount(folder):
        raise ValueError(f"{argument} is {folder}, a mount point, which cannot be replaced; allowed: a folder below it")
    allowed = f"a new or empty folder, or one of {command}" + (" with nothing else in it" if whole else "")
    mark = folder / MARK
    content = None if find_untracked(mark, [mark]) else _read(mark)
    made = {folder / name for name in content[1]} | {mark} if content else set()
    if content and content[0] not in ("", command):  # empty if its process was killed before writing the command
        raise ValueError(f"{argument} is {folder}, a folder of {content[0]}; allowed: {allowed}")
    if whole or content is None:
        stranger = find_untracked(folder, made)
        if stranger is not None:
            raise ValueError(
                f"{argument} is {folder}, which holds {stranger.relative_to(folder)}, which no {MARK} lists as "
                "made by this command; "
                f"allowed: {allowed}"
            )


class Mark:
    """The file ``.lineartime`` of a folder, open and locked: the folder's command, and the files it made."""

    def __init__(self, folder: Path, file: IO[bytes], made: set[Path]) -> None:
        self.folder, self._file, self._made = folder, file, made

    def made(self) -> set[Path]:
        """Paths made by the command and its forked processes, read from the file."""
        content = _read(self.folder / MARK)
        self._made = {self.folder / name for name in content[1]} if content else set()
        return self._made

    def has(self, path: Path) -> bool:
        """Whether ``path`` was made by the command."""
        return path in self._made or path in self.made()

    def note(self, path: Path) -> None:
        """Record that the command makes ``path``; call this before making it."""
        if path not in self._made:
            self._write(path.relative_to(self.folder).as_posix())
            self._made.add(path)

    def forget(self, path: Path) -> None:
        """Record that ``path`` no longer exists."""
        self._write({"gone": path.relative_to(self.folder).as_posix()})
        self._made.discard(path)

    def close(self, remove: bool = False) -> None:
        """Unlock the folder; with ``remove`` also delete the file."""
        if remove:
            try:
                (self.folder / MARK).unlink(missing_ok=True)
            except PermissionError:  # Windows cannot remove open files
                self._file.close()
                with contextlib.suppress(OSError):
                    (self.folder / MARK).unlink()
        self._file.close()

    def _write(self, entry: object) -> None:
        path = self.folder / MARK
        line = (json.dumps(entry) + "\n").encode()
        with errors_name_path(path):
            if self._file.write(line) < len(line):  # the disk is full
                _cut(path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def take(folder: Path, command: str, argument: str) -> Mark:
    """Create ``folder`` for ``command``, or reuse it, and lock it until ``Mark.close`` or the end of the process.

    Raises:
        ValueError: the folder is not absent, empty or made by ``command``.
        FolderInUse: another process has locked it.
    """
    folder = real_folder(folder, argument)
    path = folder / MARK
    while True:
        check_folder(folder, command, argument, whole=False)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o666)
        file = open(descriptor, "ab", buffering=0)
        try:
            os.set_inheritable(descriptor, True)  # a training that outlives its command keeps the lock
            lock(file, folder)
            # The previous holder may have removed or moved the file.
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.close()
                continue
            _cut(path)
            content = _read(path)
            mark = Mark(folder, file, {folder / name for name in content[1]} if content else set())
            if content is None or not content[0]:
                mark._write({"command": command})
            return mark
        except BaseException:
            file.close()
            raise


@contextlib.contextmanager
def unfinished(path: Path, command: str = _UNFINISHED, keep: bool = False) -> Iterator[Path]:
    """Yield ``path``.part/new/NAME, to write ``path`` there until it is complete; remove ``path``.part at the end.

    First, the leftovers of a killed run are removed, and a folder that it was replacing is moved back. With ``keep``
    unfinished work is kept, so that the next run can continue it.

    Raises:
        ValueError: ``path``.part holds anything else.
        FolderInUse: another process is using it.
        OSError: old unfinished work cannot be removed.
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
        with errors_name_path(path):
            yield new
    finally:
        _put_back(old, path)  # after an error between the two renames
        if not (keep and new.exists()):
            with contextlib.suppress(OSError):  # the next run reports files that cannot be removed
                _remove(part, _PARTS)
                mark.close(remove=True)
                part.rmdir()  # fails if other files have been added meanwhile
        mark.close()


def _put_back(old: Path, path: Path) -> None:
    """Move back a folder that was moved away to be replaced, if it was not replaced."""
    if old.exists() and not os.path.lexists(path):
        old.rename(path)


def _remove(part: Path, names: Collection[str]) -> None:
    """Remove folders of unfinished work; "old" is renamed first, since a partly removed folder must not be put back."""
    if (part / "old").exists():
        _remove_all(part / "gone")
        (part / "old").rename(part / "gone")
    for name in names:
        _remove_all(part / name)


def _remove_all(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:  # rmtree's error has only the last part of a path
        raise OSError(error.errno, f"{error.strerror}, so it cannot be removed", str(folder)) from error


@contextlib.contextmanager
def new_path(path: Path, argument: str) -> Iterator[Path]:
    """Yield a path to write a file or folder to; at the end it is renamed to ``path``, unless there was an error.

    Raises:
        ValueError: ``path`` exists, or the folder for its unfinished work holds anything else.
    """
    check_new(path, argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as new:
        yield new
        check_new(path, argument)
        _complete(new, path)


def _complete(new: Path, path: Path) -> None:
    """Rename the complete file or folder ``new`` to ``path``."""
    give_usual_modes([new, *new.rglob("*")], new.parent)
    new.rename(path)


def give_usual_modes(files: Iterable[Path], folder: Path) -> None:
    """Let whoever may read a new file of ``folder`` read ``files`` too; safetensors writes its own for the owner alone.

    Links and folders among ``files`` stay as they are.
    """
    example = folder / f".{os.getpid()}.mode"
    example.touch(exist_ok=False)  # its mode is what the process's umask gives; asking for that would change it
    usual = stat.S_IMODE(example.stat().st_mode)
    example.unlink()
    for file in files:
        mode = stat.S_IMODE(file.lstat().st_mode)
        wanted = usual | mode & 0o111 & usual >> 2  # who may read a program may run it
        if file.is_file() and not file.is_symlink() and mode != wanted:
            file.chmod(wanted)


def _replaceable(path: Path, argument: str) -> Path:
    """The real path of the folder ``path``; ValueError if it is at or above the working directory of this process."""
    folder, here = real_folder(path, argument), Path.cwd()
    if folder.exists() and (here == folder or folder in here.parents):
        raise ValueError(f"{argument} is {folder}, in which you are; allowed: a folder below it, or elsewhere")
    return folder


@contextlib.contextmanager
def empty_folder(path: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it becomes ``path``, unless there was an error.

    Raises:
        ValueError: ``path`` is no folder or is not empty, at the beginning or at the end, or is at or above the working
            directory of this process.
        FolderInUse: another process is writing it.
    """
    folder = _replaceable(path, argument)
    _check_empty(folder, argument)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as new:
        new.mkdir()
        yield new
        _check_empty(folder, argument)
        if folder.exists():
            folder.rmdir()
        _complete(new, folder)


def _check_empty(folder: Path, argument: str) -> None:
    """Raise ValueError if ``folder`` exists and is not empty."""
    content = sorted(folder.iterdir()) if folder.exists() else []
    if content:
        raise ValueError(f"{argument} is {folder}, which holds {content[0].name}; allowed: a new or an empty folder")


@contextlib.contextmanager
def new_folder(path: Path, command: str, argument: str = "--out") -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it becomes ``path`` and replaces an earlier one of ``command``.

    The earlier folder is kept until the new one is complete; if the process is killed, one of the two remains.

    Raises:
        ValueError: ``path`` holds anything that the command did not make, is no folder, or is at or above the working
            directory of this process.
        FolderInUse: another process is writing it.
    """
    check_folder(path, command, argument, whole=True)
    folder = _replaceable(path, argument)
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
        _complete(new, folder)


def _describe(folder: Path, command: str) -> None:
    """Write the file ``.lineartime`` of a complete folder."""
    (folder / MARK).unlink(missing_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    lines = [json.dumps({"command": command}), *map(json.dumps, names)]
    with open(folder / MARK, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _cut(mark: Path) -> None:
    """Remove an incomplete last line, whose file was not made yet."""
    os.truncate(mark, mark.read_bytes().rfind(b"\n") + 1)


def _read(mark: Path) -> tuple[str, set[str]] | None:
    """The command and the names in a file ``.lineartime``; None if the file does not exist."""
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
def errors_name_path(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error
