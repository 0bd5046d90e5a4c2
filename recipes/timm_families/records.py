"""The survey's records on the disk, one line of JSON for each model, so that it goes on where it was interrupted."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm

from common.json_files import check_file, checked, parse, signed, typed

from .survey import Found

#: How every record begins, those too that were cut off.
_BEGINNING = '{"timm": '


def read_records(path: Path) -> dict[str, Found]:
    """The records of ``path`` by model, those of the installed timm alone; one that was cut off is left out.

    Raises:
        ValueError: a line that is no record: the file is not of this survey.
    """
    found = {}
    check_file(path, "records of this survey")
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = parse(line)
        except ValueError as error:
            if not line.startswith(_BEGINNING):
                raise ValueError(f"{path}, line {number}, is {line[:60]!r}; allowed: records of this survey") from error
            continue
        try:
            if typed(record, dict[str, Any], "it").get("timm") == timm.__version__:
                one = typed({name: x for name, x in checked(record).items() if name != "timm"}, Found, "it")
                found[one.model] = one
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error} (allowed: records of this survey)") from error
    return found


def add_record(path: Path, found: Found) -> None:
    """Write ``found`` as a line of its own at the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write("" if whole else "\n")
        file.write(json.dumps(signed({"timm": timm.__version__, **asdict(found)})) + "\n")
