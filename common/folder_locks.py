"""A lock on a folder that ends with the process that holds it, however it ends."""

import errno
import logging
import time
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_logger = logging.getLogger(__name__)
#: What a process that was killed has started, as workers of a pool, may take so long to end.
_PATIENCE_SECONDS = 2.0
_RETRY_SECONDS = 0.1


class FolderInUse(ValueError):
    """Another run works in a folder; the message names it."""


def lock(file: IO, folder: Path) -> None:
    """Lock the open ``file`` for this process and those it forks, until all of them have closed it or ended.

    Where the file system has no locks, a warning says so, and the run goes on without.

    Raises:
        FolderInUse: another process holds it. ``folder`` is for the message.
    """
    if fcntl is None:
        _warn(folder, "this system has no file locks")
        return
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                _warn(folder, error.strerror)
                return
        if time.monotonic() > end:
            raise FolderInUse(
                f"another run, or a training that it started, works in {folder}; allowed: one at a time, or another "
                "folder"
            )
        time.sleep(_RETRY_SECONDS)


def _warn(folder: Path, reason: str) -> None:
    _logger.warning("%s cannot be locked (%s): see to it that no other run works there", folder, reason)
