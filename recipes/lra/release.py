"""The release of the Long Range Arena: an archive with all tasks except Text and Image, or the extracted folder."""

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from common.files.output_files import new_folder

from ..shared.download import find_file
from ..shared.sources import SOURCES

ARCHIVE = "lra_release.gz"
#: The recorded writer of the extracted folder.
WRITER = "recipes.lra.release"


def find_release(file: Path | None, out: Path, wanted: Callable[[str], bool], what: str) -> Path:
    """Return a folder with the ``wanted`` files of the release, at any depth; extracts the archive if necessary.

    Args:
        file: the archive, or a folder extracted from it; None downloads the archive into ``out``.
        wanted: whether to extract a member, given its name.
        what: description of the wanted files, for messages.

    Raises:
        ValueError: ``file`` does not exist, or the archive is damaged or lacks the files.
        DownloadFailed: the download failed or is incomplete.
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
    """Extract the wanted members in one pass; the folder is created only if this succeeds."""
    extracted = 0
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
                    extracted += 1
            if not extracted:
                raise ValueError(f"{file} has no {what}; allowed: the archive {ARCHIVE}")
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"{file} cannot be read: {error}; allowed: the archive {ARCHIVE}, whole") from error


def find_one(folder: Path, pattern: str) -> Path:
    """The only file or folder below ``folder`` that matches ``pattern``.

    Raises:
        ValueError: no path or several paths match.
    """
    matches = sorted(folder.rglob(pattern))
    if len(matches) != 1:
        raise ValueError(f"{folder} has {len(matches)} {pattern}; allowed: one, as in the release")
    return matches[0]
