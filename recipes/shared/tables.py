"""Tables of measurements as plain text and Markdown, with the machine and the versions below them."""

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common.files.output_files import find_untracked, unfinished

from .json_files import as_json
from .working_folder import write_text

_PACKAGES = ("torch", "fairseq-fixed", "fairseq", "timm", "sentencepiece", "gymnasium", "mujoco", "numpy")
#: Architecture -> length -> tokens per second.
Speeds = dict[str, dict[int, float]]
#: The cell of a number that was not measured.
MISSING = "-"


class Run(NamedTuple):
    """The command, machine, versions, date and duration of a run."""

    command: str
    machine: str
    versions: str
    date: str
    minutes: float


class Table(NamedTuple):
    """A table of text cells; columns of numbers are aligned right."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]]
    notes: list[str]


def describe_run(command: str, seconds: float) -> Run:
    """Describe this machine, its packages and the date."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    gibibytes = psutil.virtual_memory().total / 2**30
    machine = (
        f"{os.cpu_count()} CPU cores, {gibibytes:.0f} GiB memory, {platform.system()} {platform.machine()}, no GPU used"
    )
    date = datetime.date.today().isoformat()
    return Run(command, machine, ", ".join(versions), date, seconds / 60)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation of the values of several seeds."""
    if not values:
        return MISSING
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation}"


def counted(number: int, thing: str) -> str:
    """A number with its noun: 1 epoch, 3 epochs."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def break_even(speeds: Speeds, ours: str, peer: str) -> int | None:
    """The shortest measured length from which on ``ours`` is at least as fast as ``peer``; None if there is none."""
    lengths = sorted(set(speeds.get(ours, {})) & set(speeds.get(peer, {})))
    shortest = None
    for length in reversed(lengths):
        if speeds[ours][length] < speeds[peer][length]:
            break
        shortest = length
    return shortest


def as_text(blocks: Sequence[Table], run: Run) -> str:
    """Format tables for a terminal."""
    lines = []
    for block in blocks:
        columns = list(zip(block.header, *block.rows))
        widths = [max(map(len, column)) for column in columns]
        right = [all(is_number(cell) for cell in column[1:]) for column in columns]
        lines += [block.title, ""]
        for number, row in enumerate([block.header, *block.rows]):
            cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)]
            lines.append(("  " + "   ".join(cells)).rstrip())
            if number == 0:
                lines.append("  " + "   ".join("-" * width for width in widths))
        lines += [f"  * {note}" for note in block.notes] + [""]
    lines.append(f"{run.command}, {run.minutes:.1f} minutes, {run.date}")
    lines += [run.machine, run.versions]
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: Mapping[int, str] | None = None) -> str:
    """A table as Markdown; columns of numbers, with or without empty cells, are aligned right.

    ``align``: column index -> "left" or "right", where that differs.
    """
    sides = []
    for i in range(len(header)):
        cells = [row[i] for row in rows if row[i]]
        number = bool(cells) and all(map(is_number, cells))
        sides.append((align or {}).get(i, "right" if number else "left"))
    lines = [header, ["---:" if side == "right" else "---" for side in sides], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_markdown(blocks: Sequence[Table], run: Run) -> str:
    """Format tables for a README."""
    lines = []
    for block in blocks:
        lines += [f"### {block.title}", "", markdown_table(block.header, block.rows), ""]
        lines += [f"* {note}" for note in block.notes] + [""]
    lines.append(f"`{run.command}`, {run.minutes:.1f} minutes, {run.date}; {run.machine}; {run.versions}.")
    return "\n".join(lines)


def write_reports(out: Path, blocks: Sequence[Table], run: Run, content: dict[str, Any]) -> str:
    """Write tables to ``out`` as results.txt and .md, and ``content`` as results.json; returns the text."""
    plain = as_text(blocks, run)
    for name, text in (("txt", plain + "\n"), ("md", as_markdown(blocks, run) + "\n"), ("json", as_json(content))):
        write_text(out / f"results.{name}", text)
    return plain


def check_document(path: Path, module: str, argument: str) -> None:
    """Raise ValueError if ``path`` exists and is not a document of ``write_document`` by ``module``.

    A document ends with the command that wrote it, so that documents in a checkout can be written again.
    """
    lines = path.read_bytes().rstrip().splitlines()[-1:] if path.is_file() else []
    is_own = lines and lines[0].startswith(f"`python -m {module}".encode())
    if find_untracked(path, [path] if is_own else []) is not None or path.is_dir():
        raise ValueError(f"{argument} is {path}, which is there; allowed: a new file, or one that {module} wrote")


def write_document(path: Path, text: str, module: str, argument: str = "--out") -> None:
    """Write ``as_markdown``'s ``text`` to ``path``, completely or not at all; see ``check_document``."""
    check_document(path, module, argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path, module) as new:
        new.write_text(text, encoding="utf-8")
        check_document(path, module, argument)
        new.replace(path)


def is_number(cell: str) -> bool:
    """Whether a cell is a number, or marks a number that was not measured."""
    return cell == MISSING or cell[:1].isdigit()
