"""The survey's records on disk, one line of JSON per model, so that an interrupted survey can continue."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm

from common.files.json_files import check_file, checked, parse, signed, typed

from .survey import Found

#: The beginning of every record, also of incomplete ones.
_BEGINNING = '{"timm": '


def read_records(path: Path) -> dict[str, Found]:
    """Read the records of the installed timm version by model; an incomplete line is skipped.

    Raises:
        ValueError: a line is not a record, so the file was not written by this survey.
    """
    records = {}
    check_file(path, "records of this survey")
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            content = parse(line)
        except ValueError as error:
            if not line.startswith(_BEGINNING):
                raise ValueError(f"{path}, line {number}, is {line[:60]!r}; allowed: records of this survey") from error
            continue
        try:
            if typed(content, dict[str, Any], "it").get("timm") == timm.__version__:
                model_record = typed(
                    {name: value for name, value in checked(content).items() if name != "timm"}, Found, "it"
                )
                records[model_record.model] = model_record
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error} (allowed: records of this survey)") from error
    return records


def add_record(path: Path, found: Found) -> None:
    """Append ``found`` to ``path`` as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends_with_newline = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write("" if ends_with_newline else "\n")
        file.write(json.dumps(signed({"timm": timm.__version__, **asdict(found)})) + "\n")
