"""Downloads that are complete or absent: progress bar, resume, size and checksum, a rename at the end."""

import errno
import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from common.files.output_files import check_new, unfinished

from .scripts import RecipeFailed

#: At least one host answers "403 Forbidden" to urllib's default name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0 Safari/537.36"
TIMEOUT_SECONDS = 60
_BLOCK = 1 << 20
#: The recorded owner of unfinished downloads, so that any recipe may continue them.
_COMMAND = "recipes.shared.download"


_Result = TypeVar("_Result")


class Source(NamedTuple):
    """A published file, with its size and a checksum if they are known; see ``sources.py``."""

    url: str
    size: int | None = None  # bytes
    sha256: str | None = None
    members: tuple[str, ...] = ()  # the files of an archive that are read, in any of its folders
    md5: str | None = None  # if no sha256 is published

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]

    def difference(self, path: Path) -> str | None:
        """How the file ``path`` differs: "has MD5 ...; allowed: ..."; None if size and checksum are right."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"has {size:,} bytes; allowed: {self.size:,}"
        for algorithm, expected in (("sha256", self.sha256), ("md5", self.md5)):
            if expected is not None and (digest := file_digest(path, algorithm)) != expected:
                return f"has {algorithm} {digest}; allowed: {expected}"
        return None


class DownloadFailed(RecipeFailed):
    """A file could not be downloaded completely; the message has the address and the reason."""


def first_source(name: str, sources: Sequence[Callable[[], _Result]], hint: str) -> _Result:
    """Try the ``sources`` of ``name`` in turn; returns the result of the first that does not fail.

    Raises:
        DownloadFailed: all failed; the message has every reason, and ``hint`` says what else the user could do.
    """
    reasons = []
    for source in sources:
        try:
            return source()
        except DownloadFailed as error:
            print(f"  {error}", flush=True)
            reasons.append(str(error))
    raise DownloadFailed(
        f"no source gave {name}:\n  " + "\n  ".join(reasons) + f"\nRun again to continue a download, or {hint}"
    )


def fetch(source: Source, folder: Path) -> Path:
    """Download ``source`` into ``folder`` unless it is there; returns the file.

    Raises:
        DownloadFailed: it could not be downloaded completely.
        ValueError: a different file exists there.
    """
    path = folder / source.name
    if not path.exists():
        download(source, path)
    elif difference := source.difference(path):
        raise ValueError(f"{path} {difference}, or no file, which is downloaded then")
    return path


def find_file(file: Path | None, source: Source, folder: Path, advice: str = "give a copy you have") -> Path:
    """The user's ``file``, or if it is None the download of ``source`` in ``folder``; see ``fetch``.

    Args:
        advice: what the user could do with ``--file``, for the message if the download fails.

    Raises:
        DownloadFailed: it could not be downloaded completely.
        ValueError: the file does not exist or is a different one.
    """
    if file is None:
        try:
            return fetch(source, folder)
        except DownloadFailed as error:
            raise DownloadFailed(f"{error}. Run again to continue, or {advice}: --file {source.name}") from error
    if not file.is_file():
        raise ValueError(f"--file is {file}, which is no file; allowed: {source.name}")
    if difference := source.difference(file):
        raise ValueError(f"{file} {difference}, which {source.name} has")
    return file


def download(source: Source, path: Path, show_progress: bool = True) -> None:
    """Download ``source`` to ``path``, which exists afterwards only if the download is complete and correct.

    An incomplete download is kept in the folder ``path``.part, and the next call continues it if the host allows that;
    after a full disk it is removed.

    Args:
        show_progress: show a progress bar; a caller with many small files shows one for all of them.

    Raises:
        DownloadFailed: no answer, an error, a truncated file, or a wrong size or checksum.
        ValueError: ``path`` exists, or ``path``.part is not from a download.
        FolderInUse: another process is downloading it.
    """
    check_new(path, "the file to download")
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path, _COMMAND, keep=True) as part:
        have_bytes = part.stat().st_size if part.exists() else 0
        if source.size is None or have_bytes < source.size:  # complete if only the rename is missing
            _continue(source.url, part, have_bytes, show_progress)
        if difference := source.difference(part):
            if source.size is None or part.stat().st_size >= source.size:  # continuing would not correct it
                part.unlink()
            raise DownloadFailed(f"{source.url} {difference}")
        part.rename(path)


def _continue(url: str, part: Path, have: int, show_progress: bool) -> None:
    headers = {"User-Agent": USER_AGENT}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as answer:
            if have and answer.status != 206:  # the host sends everything again
                have = 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length is not None else None
            bar = tqdm(
                total=total,
                initial=have,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                desc=part.stem,
                disable=None if show_progress else True,
            )
            with bar, open(part, "ab" if have else "wb") as file:
                while block := answer.read(_BLOCK):
                    file.write(block)
                    bar.update(len(block))
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing is left to send
            return
        raise DownloadFailed(f"{url}: {error}") from error
    except (OSError, ValueError) as error:  # URLError, timeouts and broken connections are OSErrors
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            part.unlink(missing_ok=True)
            raise DownloadFailed(f"{url}: {part.parents[2]}: {error}") from error
        raise DownloadFailed(f"{url}: {error}") from error
    if total is not None and part.stat().st_size < total:
        raise DownloadFailed(f"{url}: ended after {part.stat().st_size} of {total} bytes")


def file_sha256(path: Path) -> str:
    """Checksum of a file in hexadecimal."""
    return file_digest(path, "sha256")


def file_digest(path: Path, algorithm: str) -> str:
    """Checksum of a file in hexadecimal, by an algorithm of ``hashlib``."""
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
