"""The release of the Long Range Arena: one archive with all tasks but Text and Image, or a folder extracted from it."""

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from common.output_files import new_folder

from ..shared.download import find_file
from ..shared.sources import SOURCES

ARCHIVE = "lra_release.gz"
#: Whose the extracted folder is.
WRITER = "recipes.lra.release"


def find_release(file: Path | None, out: Path, wanted: Callable[[str], bool], what: str) -> Path:
    """A folder with the ``wanted`` files of the release, at any depth: ``file`` itself, or extracted into ``out``.

    Args:
        file: the archive, or a folder that was extracted from it; None downloads the archive into ``out``.
        wanted: tells from the name of a member whether it is extracted.
        what: is looked for, for messages.

    Raises:
        ValueError: there is nothing at ``file``, or the archive is damaged or lacks the files.
        DownloadFailed: the archive could not be downloaded whole.
    """
    if file is not None and file.is_dir():
        return file
    folder = out / "release"
    if folder.is_dir():
        return folder
    if file is None:
        file = find_file(None, SOURCES["long_range_arena"], out, "give a copy, or the extracted folder")
    if not file.is_file():
        raise ValueError(f"--file is {file}, which does not exist; allowed: {ARCHIVE}, or the folder in it")
    _extract(file, folder, wanted, what)
    return folder


def _extract(file: Path, folder: Path, wanted: Callable[[str], bool], what: str) -> None:
    """Extract the wanted members in one pass; the folder exists afterwards only if that went through."""
    found = 0
    try:
        with (
            new_folder(folder, WRITER) as unfinished,
            open(file, "rb") as stream,
            tqdm(total=file.stat().st_size, unit="B", unit_scale=True, desc=file.name, disable=None) as bar,
            tarfile.open(fileobj=stream, mode="r|gz") as archive,
        ):
            for member in archive:
                bar.update(stream.tell() - bar.n)
                if member.isfile() and wanted(member.name):
                    archive.extract(member, unfinished, filter="data")
                    found += 1
            if not found:
                raise ValueError(f"{file} has no {what}; allowed: the archive {ARCHIVE}")
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"{file} cannot be read: {error}; allowed: the archive {ARCHIVE}, whole") from error


def find_one(folder: Path, pattern: str) -> Path:
    """The only file or folder below ``folder`` that matches ``pattern``.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} {pattern}; allowed: one, as in the release")
    return found[0]
