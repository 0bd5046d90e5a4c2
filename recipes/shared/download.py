"""Downloads that are complete or absent: progress bar, resume, size and checksum, a rename at the end."""

import errno
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from common.output_files import check_new, unfinished

from .scripts import RecipeFailed

#: At least one host answers urllib's own name with "403 Forbidden".
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0 Safari/537.36"
TIMEOUT_SECONDS = 60
_BLOCK = 1 << 20
#: Whose unfinished work it is: any recipe may continue it.
_COMMAND = "recipes.shared.download"


_Result = TypeVar("_Result")


class DownloadFailed(RecipeFailed):
    """A file could not be downloaded whole; the message has the address and the reason."""


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


def download(
    url: str, path: Path, size: int | None = None, sha256: str | None = None, show_progress: bool = True
) -> None:
    """Download ``url`` to ``path``, which exists afterwards only if the download is complete and correct.

    An incomplete download is kept in the folder ``path``.part, and the next call continues it if the host allows that;
    after a full disk it is removed.

    Args:
        size: bytes the file must have.
        sha256: checksum it must have, in hexadecimal.
        show_progress: show a progress bar; a caller with many small files shows one for all of them.

    Raises:
        DownloadFailed: no answer, an error, a truncated file, or a wrong size or checksum.
        ValueError: there is a file already, or ``path``.part is not of a download.
        FolderInUse: another process is downloading it.
    """
    check_new(path, "the file to download")
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path, _COMMAND, keep=True) as part:
        have = part.stat().st_size if part.exists() else 0
        if size is None or have < size:  # a complete one remains if only the rename is missing
            _continue(url, part, have, show_progress)
        _check(url, part, size, sha256)
        part.rename(path)


def _check(url: str, part: Path, size: int | None, sha256: str | None) -> None:
    """Raise DownloadFailed for another size or checksum, and remove what continuing would not correct."""
    have = part.stat().st_size
    if size is not None and have != size:
        if have > size:
            part.unlink()
        raise DownloadFailed(
            f"{url}: got {have if have < size else 'more'} bytes; allowed: {size}. Run again to continue"
        )
    if sha256 is not None:
        digest = file_sha256(part)
        if digest != sha256:
            part.unlink()
            raise DownloadFailed(f"{url}: sha256 is {digest}; allowed: {sha256}")


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
        raise DownloadFailed(f"{url}: ended after {part.stat().st_size} of {total} bytes. Run again to continue")


def read_json(url: str) -> Any:
    """The JSON document at ``url``.

    Raises:
        DownloadFailed: no answer, or one that is no JSON.
    """
    try:
        request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise DownloadFailed(f"{url}: {error}") from error


def check_digest(path: Path, sha256: str) -> None:
    """Raise ValueError if the file ``path`` is not the one with this checksum. It stays: it may be the user's."""
    digest = file_sha256(path)
    if digest != sha256:
        raise ValueError(f"{path} has sha256 {digest}; allowed: {sha256}, or no file, which is downloaded then")


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
