"""Read ``.ts`` files with sktime's loader; error messages name the line and the problem."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairseq_plugin.data.series_folder import Split, check_series, fill_missing

from ..shared.scripts import RecipeFailed

_FORMAT = "values separated by commas, channels by colons, the label last, and ? for a missing value"
#: One value; and the characters of a channel, which are faster to check in a file of millions of values.
_VALUE = re.compile(r"\?|[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CHANNEL = re.compile(r"[-+\d.eE?,\s]+")


class _Line(NamedTuple):
    """One series of a file."""

    number: int  # line number, from 1
    channels: list[str]
    label: str


def read_ts(path: Path) -> Split:
    """Read the series (T, C) of a file, with missing values interpolated, and their labels as written in the file.

    Raises:
        ValueError: the file is not a ``.ts`` file for classification or is damaged, or a series is empty, differs from
            the header in channels or steps, has channels of unequal lengths, a value that is not a finite number, or a
            label that the header does not list. The message names the file and the line.
        RecipeFailed: sktime is not installed.
    """
    try:
        lines = list(_cases(path, path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: a .ts file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; allowed: a .ts file") from error
    if not lines:
        raise ValueError(f"{path} has no series; allowed: at least one line after @data")
    try:
        frame = _load(path)
    except ValueError:
        for line in lines:
            _check_values(f"{path}, line {line.number}", line.channels)
        raise
    series = []
    for line, row in zip(lines, frame.itertuples(index=False), strict=True):
        location = f"{path}, line {line.number}"
        lengths = {len(channel) for channel in row}
        if len(lengths) > 1:
            raise ValueError(f"{location} has channels of {min(lengths)} to {max(lengths)} steps; allowed: one length")
        try:
            values = fill_missing(np.stack([channel.to_numpy(np.float64) for channel in row], axis=1))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        series.append(check_series(values, location))
    return Split(series, [line.label for line in lines])


def _load(path: Path):
    """The values of a file as sktime's loader returns them: a row per series, a column per channel."""
    try:
        from sktime.datasets import load_from_tsfile_to_dataframe
    except ModuleNotFoundError as error:
        raise RecipeFailed(f".ts files need sktime ({error}). Run: pip install '.[fairseq,time_series]'") from error
    try:
        return load_from_tsfile_to_dataframe(str(path))[0]
    except (OSError, ValueError) as error:  # sktime raises OSError for errors inside a file
        raise ValueError(f"{path} cannot be read: {error}; allowed: a .ts file") from error


def _cases(path: Path, text: str) -> Iterator[_Line]:
    """Yield the lines after @data. sktime checks less, does not name the line, and converts labels to lower case."""
    header: dict[str, list[str]] = {}
    first: _Line | None = None
    for number, line in enumerate(text.splitlines(), 1):
        location = f"{path}, line {number}"
        if not line.strip() or ("@data" not in header and line.startswith("#")):
            continue
        if "@data" not in header:
            tag, *values = line.split()
            if not tag.startswith("@"):
                raise ValueError(
                    f"{location} is {line[:60]!r}; allowed before @data: a tag that begins with @, a comment"
                )
            header[tag.lower()] = values
            continue
        if first is None:
            _check_header(path, header)
            dimensions, length = _declared(path, header)
        *channels, label = (part.strip() for part in line.split(":"))
        case = _Line(number, channels, label)
        first = first or case
        _check_case(location, case, dimensions or len(first.channels), header["@classlabel"][1:])
        steps = channels[0].count(",") + 1
        if length not in (None, steps):
            raise ValueError(f"{location} has {steps} steps; allowed: {length}, as @seriesLength says")
        yield case


def _check_header(path: Path, header: dict[str, list[str]]) -> None:
    for tag, allowed in (("@timestamps", "false"), ("@classlabel", "true")):
        value = " ".join(header.get(tag, ["missing"])[:1])
        if value.lower() != allowed:
            raise ValueError(f"{path}: {tag} is {value}; allowed: {allowed}, as in the UEA archive")
    if len(header["@classlabel"]) < 2:
        raise ValueError(f"{path}: @classlabel lists no label; allowed: true and at least one")


def _declared(path: Path, header: dict[str, list[str]]) -> tuple[int | None, int | None]:
    """The numbers of channels and of steps declared in the header; None if not declared."""
    declared = {}
    for tag in ("@dimensions", "@serieslength"):
        values = header.get(tag)
        if values is not None and not (len(values) == 1 and values[0].isdecimal() and int(values[0]) >= 1):
            raise ValueError(f"{path}: {tag} is {' '.join(values)!r}; allowed: one integer of at least 1")
        declared[tag] = None if values is None else int(values[0])
    equal_length = " ".join(header.get("@equallength", [])).lower() == "true"
    return declared["@dimensions"], declared["@serieslength"] if equal_length else None


def _check_case(where: str, case: _Line, channels: int, labels: list[str]) -> None:
    if len(case.channels) != channels or not channels:
        raise ValueError(f"{where} has {len(case.channels)} channels; allowed: {channels or 'at least 1'} ({_FORMAT})")
    if case.label not in labels:
        raise ValueError(f"{where} has the label {case.label!r}; allowed: {', '.join(map(repr, labels))}")
    if not all(map(_CHANNEL.fullmatch, case.channels)):
        _check_values(where, case.channels)


def _check_values(where: str, channels: list[str]) -> None:
    for i, channel in enumerate(channels):
        if not channel:
            raise ValueError(f"{where} has no value in channel {i}; allowed: at least one step ({_FORMAT})")
        for value in channel.split(","):
            if not _VALUE.fullmatch(value.strip()):
                raise ValueError(f"{where} has {value.strip()!r} in channel {i}; allowed: {_FORMAT}")
