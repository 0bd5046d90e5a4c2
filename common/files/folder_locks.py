"""A lock on a folder that is released when the process that holds it ends, for any reason."""

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
#: Time for child processes of a killed process, such as workers of a pool, to end.
_PATIENCE_SECONDS = 2.0
_RETRY_SECONDS = 0.1


class FolderInUse(ValueError):
    """Another run is using a folder; the message names the folder."""


def lock(file: IO, folder: Path) -> None:
    """Lock the open ``file`` for this process and those it forks, until all of them have closed it or ended.

    If the file system has no locks, a warning is logged, and the run continues without a lock.

    Raises:
        FolderInUse: another process holds the lock; the message names ``folder``.
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
