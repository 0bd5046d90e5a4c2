"""Folders of results that a test lays out itself, as if a command had made them."""

import json
from pathlib import Path

from common.output_files import MARK


def made_by(command: str, folder: Path) -> Path:
    """Say in ``folder`` that ``command`` made all that is in it; returns it."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    (folder / MARK).write_text("".join(json.dumps(line) + "\n" for line in ({"command": command}, *names)))
    return folder
