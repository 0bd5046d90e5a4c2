"""Extract files from zip archives, completely or not at all."""

import shutil
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from .working_folder import atomic_write

_READ_BYTES = 1 << 20


def extract(archive: Path, members: Iterable[str], folder: Path, allowed: str) -> None:
    """Extract the files ``members``, from any folder of a zip archive, into ``folder``.

    Args:
        allowed: a description of the allowed archives, for messages.

    Raises:
        ValueError: the zip archive is damaged or lacks a file, or a file exists that this command did not write.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = {Path(info.filename).name: info for info in opened.infolist() if not info.is_dir()}
            for name in members:
                if name not in infos:
                    raise ValueError(f"{archive} lacks {name}; allowed: {allowed}")
                with atomic_write(folder / name) as part, opened.open(infos[name]) as member, part.open("wb") as target:
                    size = infos[name].file_size
                    with tqdm.wrapattr(
                        member, "read", total=size, desc="unzipping", leave=False, disable=None
                    ) as source:
                        shutil.copyfileobj(source, target, _READ_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{archive} cannot be read: {error}; allowed: {allowed}, whole") from error
