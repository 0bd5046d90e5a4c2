"""Folders given by the user: a path, an archive, or the URL of an archive."""

import atexit
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection
from http.client import HTTPException

import torch


def find_folder(argument: str, path: str, names: Collection[str] = ()) -> str:
    """The folder at ``path``, the value of ``argument``; ``names`` are other allowed values, for messages.

    An archive (.tar, .tar.gz, .tar.bz2, .tar.xz), local or at a URL, is extracted into a temporary folder, which is
    deleted when the process ends; a local archive is kept.

    Raises:
        ValueError: ``path`` is neither a folder nor an archive, or the archive has members outside its folder, or
            members other than files, folders and links inside it.
    """
    if os.path.isdir(path):
        return path
    temporary = tempfile.mkdtemp(prefix="lineartime-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    try:
        archive = path
        if path.startswith(("http://", "https://")):
            archive = os.path.join(temporary, "archive")
            torch.hub.download_url_to_file(path, archive, progress=False)
        return _extract(archive, os.path.join(temporary, "extracted"))
    except (OSError, EOFError, ValueError, HTTPException, tarfile.TarError) as error:
        shutil.rmtree(temporary)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        named = "".join(f"{name!r}, " for name in names)
        raise ValueError(
            f"{argument} is {path!r}; allowed: {named}a folder, an archive of one (tar), or the URL of an archive "
            f"({reason})"
        ) from error


def _extract(archive: str, target: str) -> str:
    """Extract ``archive`` into the new folder ``target``; returns the only folder in it, otherwise ``target``."""
    if not hasattr(tarfile, "data_filter"):
        raise ValueError("this Python cannot extract archives safely; 3.10.12, 3.11.4 and newer ones can")
    with tarfile.open(archive) as members:
        members.extractall(target, filter="data")
    entries = [os.path.join(target, name) for name in os.listdir(target)]
    return entries[0] if len(entries) == 1 and os.path.isdir(entries[0]) else target
