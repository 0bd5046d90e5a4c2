"""The UEA data sets of the Flowformer paper's Table 6: their expected sizes and their files."""

import hashlib
import tempfile
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

from fairseq_plugin.data.series_folder import Split

from ..shared.archives import extract
from ..shared.download import find_file
from ..shared.scripts import RecipeFailed
from ..shared.sources import SOURCES
from .ts_files import read_ts

SPLITS = {"train": "TRAIN", "test": "TEST"}
_ADVICE = "give a copy you have, such as that of https://timeseriesclassification.com"


class Archive(NamedTuple):
    """The size of a data set, from the paper's Table 9."""

    train: int  # number of series
    test: int
    channels: int
    length: int  # of the longest series
    classes: int


#: Data sets that are not in ``SOURCES`` are part of sktime.
ARCHIVES = {
    "EthanolConcentration": Archive(261, 263, 3, 1751, 4),
    "FaceDetection": Archive(5890, 3524, 144, 62, 2),
    "Handwriting": Archive(150, 850, 3, 152, 26),
    "Heartbeat": Archive(204, 205, 61, 405, 2),
    "JapaneseVowels": Archive(270, 370, 12, 29, 9),
    "PEMS-SF": Archive(267, 173, 963, 144, 7),
    "SelfRegulationSCP1": Archive(268, 293, 6, 896, 2),
    "SelfRegulationSCP2": Archive(200, 180, 7, 1152, 2),
    "SpokenArabicDigits": Archive(6599, 2199, 13, 93, 10),
    "UWaveGestureLibrary": Archive(120, 320, 3, 315, 8),
    # Not in the paper's table, but in the archive and in sktime.
    "BasicMotions": Archive(40, 40, 6, 100, 4),
}


def read_archive(name: str, downloads: Path, file: Path | None = None) -> dict[str, Split]:
    """Read the splits of data set ``name`` from ``file``, from sktime, or from a download into ``downloads``.

    ``file`` is a zip that contains NAME_TRAIN.ts and NAME_TEST.ts, or NAME_TRAIN.ts with NAME_TEST.ts in the same
    folder. It may be any data set; those of ``ARCHIVES`` must be complete.

    Raises:
        ValueError: the name is unknown and there is no file, or the data is damaged or incomplete.
        DownloadFailed: the download failed or is incomplete.
    """
    if file is None and name not in ARCHIVES:
        raise ValueError(f"--dataset is {name}; allowed without --file: {', '.join(ARCHIVES)}")
    if file is not None:
        splits = _read_file(name, file)
    elif name in SOURCES:
        splits = _read_zip(name, find_file(None, SOURCES[name], downloads, _ADVICE))
    else:
        splits = _read_package(name)
    if name in ARCHIVES:
        _check_whole(name, splits, ARCHIVES[name])
    return splits


def digest(splits: Mapping[str, Split]) -> str:
    """SHA-256 of the series and labels of all splits."""
    sha256 = hashlib.sha256()
    for name, split in splits.items():
        sha256.update(repr((name, split.labels, [values.shape for values in split.series])).encode())
        for values in split.series:
            sha256.update(values.tobytes())
    return sha256.hexdigest()


def _read_package(name: str) -> dict[str, Split]:
    """Read a data set that is part of sktime."""
    try:
        folder = files("sktime.datasets") / "data" / name
    except ModuleNotFoundError as error:
        raise RecipeFailed(
            f"{name} comes with sktime, which is not installed ({error}). Run: pip install '.[fairseq,time_series]', "
            f"or give a copy you have: --file {name}.zip"
        ) from error
    with as_file(folder) as path:
        return {split: read_ts(path / f"{name}_{part}.ts") for split, part in SPLITS.items()}


def _read_file(name: str, file: Path) -> dict[str, Split]:
    if not file.is_file():
        raise ValueError(f"--file is {file}, which is no file; allowed: {name}.zip, or {name}_TRAIN.ts beside _TEST.ts")
    if file.suffix != ".ts":
        return _read_zip(name, file)
    if not file.stem.upper().endswith("_TRAIN"):
        raise ValueError(f"--file is {file}; allowed: a zip, or a file named ..._TRAIN.ts, with ..._TEST.ts beside it")
    test = file.with_name(file.stem[: -len("TRAIN")] + ("TEST" if file.stem.endswith("TRAIN") else "test") + ".ts")
    if not test.is_file():
        raise ValueError(f"--file is {file} without {test.name} beside it; allowed: both files in one folder")
    return {"train": read_ts(file), "test": read_ts(test)}


def _read_zip(name: str, path: Path) -> dict[str, Split]:
    members = {split: f"{name}_{part}.ts" for split, part in SPLITS.items()}
    with tempfile.TemporaryDirectory() as folder:
        extract(path, members.values(), Path(folder), f"a zip with {' and '.join(members.values())}")
        try:
            return {split: read_ts(Path(folder, member)) for split, member in members.items()}
        except ValueError as error:  # name the archive, since the temporary folder is deleted
            raise ValueError(str(error).replace(f"{folder}/", f"{path}: ")) from error


def _check_whole(name: str, splits: dict[str, Split], archive: Archive) -> None:
    """Raise ValueError unless the sizes are those of Table 9: a file may be truncated between two lines."""
    all_series = [series for split in splits.values() for series in split.series]
    sizes = (
        len(splits["train"].series),
        len(splits["test"].series),
        all_series[0].shape[1],
        max(map(len, all_series)),
        len({label for split in splits.values() for label in split.labels}),
    )
    for size_name, size, expected_size in zip(Archive._fields, sizes, archive):
        if size != expected_size:
            raise ValueError(f"{name} has {size_name} {size}; allowed: {expected_size}, as the whole data set")
