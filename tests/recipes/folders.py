"""Folders of results made by a test, marked as written by a command."""

import json
from pathlib import Path

from common.files.output_files import MARK


def made_by(command: str, folder: Path) -> Path:
    """Mark everything in ``folder`` as made by ``command``; returns the folder."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    (folder / MARK).write_text("".join(json.dumps(line) + "\n" for line in ({"command": command}, *names)))
    return folder
