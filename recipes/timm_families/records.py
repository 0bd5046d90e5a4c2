"""The survey's records on the disk, one line of JSON for each model, so that it goes on where it was interrupted."""

import json
from dataclasses import asdict
from pathlib import Path

import timm

from .survey import Found


def read_records(path: Path) -> dict[str, Found]:
    """The records of ``path`` by model, those of the installed timm alone; a last line that was cut off is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.pop("timm") == timm.__version__:
            found[record["model"]] = Found(**record)
    return found


def add_record(path: Path, found: Found) -> None:
    """Write ``found`` as a line of its own at the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write("" if whole else "\n")
        file.write(json.dumps({"timm": timm.__version__, **asdict(found)}) + "\n")
