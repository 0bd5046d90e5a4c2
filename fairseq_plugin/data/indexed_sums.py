"""Checksums for fairseq's indexed datasets, ``SPLIT.bin`` and ``SPLIT.idx``, which have no checksums themselves.

``SPLIT.sha256`` is the output of ``sha256sum SPLIT.bin SPLIT.idx``. Datasets without it, such as those of
fairseq-preprocess, are read unchecked.
"""

import hashlib
from pathlib import Path

from fairseq.data import Dictionary, FairseqDataset, data_utils

from common.files.json_files import check_file

_PARTS = (".bin", ".idx")
_READ_AT_ONCE = 2**22


def write_sums(prefix: Path) -> None:
    """Write the checksums of the dataset ``prefix``."""
    _sums_of(prefix).write_text(_sums(prefix), encoding="utf-8")


def check_sums(prefix: Path, combine: bool = False) -> None:
    """Raise ValueError unless the files of ``prefix`` match their checksums; O(their size).

    With ``combine``, also the files of ``prefix``1, ``prefix``2 and so on, which fairseq joins.
    """
    number = 0
    while number == 0 or (combine and Path(f"{prefix}{number}.idx").is_file()):
        path = prefix.with_name(f"{prefix.name}{number or ''}")
        sums = _sums_of(path)
        if sums.exists():
            for file in (sums, *(path.with_name(path.name + part) for part in _PARTS)):
                check_file(file, "files as they were prepared")
            try:
                matches = sums.read_bytes() == _sums(path).encode()
            except FileNotFoundError as error:
                raise ValueError(f"{error.filename} does not exist; allowed: files as they were prepared") from error
            except OSError as error:
                raise ValueError(f"{sums} cannot be compared: {error}; allowed: files as they were prepared") from error
            if not matches:
                names = " or ".join(f"{path}{part}" for part in _PARTS)
                raise ValueError(f"{names} is not what {sums} says of it; allowed: files as they were prepared")
        number += 1


def load_tokens(
    prefix: Path, allowed: str, dictionary: Dictionary | None = None, combine: bool = False
) -> FairseqDataset:
    """Load and check the dataset ``prefix``; tokens are read from disk on access.

    Raises:
        ValueError: it is missing or damaged; the message ends with ``allowed``.
    """
    check_sums(prefix, combine)
    try:
        dataset = data_utils.load_indexed_dataset(str(prefix), dictionary, combine=combine)
    except Exception as error:  # fairseq's reader raises assertions and numpy's errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{prefix}.idx cannot be read: {reason}; {allowed}") from error
    if dataset is None:
        what = "is no index of fairseq's" if Path(f"{prefix}.idx").exists() else "does not exist"
        raise ValueError(f"{prefix}.idx {what}; {allowed}")
    return dataset


def _sums_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.sha256")


def _sums(prefix: Path) -> str:
    lines = []
    for part in _PARTS:
        path, digest = prefix.with_name(prefix.name + part), hashlib.sha256()
        with open(path, "rb") as file:
            while content := file.read(_READ_AT_ONCE):
                digest.update(content)
        lines.append(f"{digest.hexdigest()}  {path.name}\n")
    return "".join(lines)
