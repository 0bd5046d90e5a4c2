"""The UEA data sets of the Flowformer paper's Table 6: where they are, and what must be in them."""

import contextlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

from fairseq_plugin.data.series_folder import Split

from ..shared.download import DownloadFailed, check_digest, download
from ..shared.scripts import RecipeFailed
from .ts_files import read_ts

#: sktime's mirror of the archive; sizes and checksums are of its files (Git LFS pointers of its commit 12d0529).
MIRROR = "https://github.com/sktime/sktime-datasets/raw/main/TSC"
SPLITS = {"train": "TRAIN", "test": "TEST"}


class Archive(NamedTuple):
    """A data set: what is in it (Table 9), and its zip file at the mirror, if it is there."""

    train: int  # series
    test: int
    channels: int
    length: int  # of the longest series
    classes: int
    size: int | None = None  # bytes; None for a data set that comes with sktime
    sha256: str = ""


ARCHIVES = {
    "EthanolConcentration": Archive(
        261, 263, 3, 1751, 4, 377_813_600, "67c4ff269ad40b474a0917572c0b36256829bdb33df40521c09fcac0c52c6ce4"
    ),
    "FaceDetection": Archive(
        5890, 3524, 144, 62, 2, 600_391_318, "a881a69542f80ceaf718c5ab93ccb107c71003ab852f9d9cdabf9c8faa549e85"
    ),
    "Handwriting": Archive(
        150, 850, 3, 152, 26, 2_810_939, "e8a19ce94c82ee76205d441c77928a08ec34f7dcbf3edc11f569055c6ed51a8b"
    ),
    "Heartbeat": Archive(
        204, 205, 61, 405, 2, 80_854_057, "2a55749595da3b17c708bfb33a990b4abb4ce10637c9e265183d48d6a43b52f0"
    ),
    "JapaneseVowels": Archive(270, 370, 12, 29, 9),
    "PEMS-SF": Archive(
        267, 173, 963, 144, 7, 327_596_807, "8e04f4588bd3a3cac7aa557086386f0b8a559db765036e47809c21747a920309"
    ),
    "SelfRegulationSCP1": Archive(
        268, 293, 6, 896, 2, 7_687_240, "5581185eeb098153e3f7524048eec7371c11b52c0ad0f52f7612eeea4267ef83"
    ),
    "SelfRegulationSCP2": Archive(
        200, 180, 7, 1152, 2, 7_259_176, "16f94e935e4dd5d57a35c1035ab32d4d9074c81b3e78a51ab9680179d33478b9"
    ),
    "SpokenArabicDigits": Archive(
        6599, 2199, 13, 93, 10, 82_065_250, "d7fad522cc54e2dac9309ad5ea79b5120d4272cd9293ed7ff9aabe256009ca4e"
    ),
    "UWaveGestureLibrary": Archive(
        120, 320, 3, 315, 8, 2_972_926, "c6a771794bb14a815e204307b7d7e85d7a8291ddb16626cb9460aa5a75b6e042"
    ),
    # Not in the table, but in the archive, and in sktime.
    "BasicMotions": Archive(40, 40, 6, 100, 4),
}


def read_archive(name: str, downloads: Path, file: Path | None = None) -> dict[str, Split]:
    """The splits of data set ``name``: from ``file``, or from sktime, or downloaded into the folder ``downloads``.

    ``file`` is a zip with NAME_TRAIN.ts and NAME_TEST.ts in it, or the first of them with the second beside it. Its
    data set may be any, and those of ``ARCHIVES`` must be whole.

    Raises:
        ValueError: a name that is not known without a file, or a file that is no such data set, damaged or not whole.
        DownloadFailed: the data set could not be downloaded whole.
    """
    if file is None and name not in ARCHIVES:
        raise ValueError(f"--dataset is {name}; allowed without --file: {', '.join(ARCHIVES)}")
    if file is not None:
        splits = _read_file(name, file)
    elif ARCHIVES[name].size is None:
        splits = _read_package(name)
    else:
        splits = _read_zip(name, fetch(name, downloads))
    if name in ARCHIVES:
        _check_whole(name, splits, ARCHIVES[name])
    return splits


def fetch(name: str, downloads: Path) -> Path:
    """Download the zip of a data set unless it is there; returns it.

    Raises:
        ValueError: what is there is another file.
        DownloadFailed: it could not be downloaded whole.
    """
    archive, path = ARCHIVES[name], downloads / f"{name}.zip"
    if path.exists():
        check_digest(path, archive.sha256)
    else:
        try:
            download(f"{MIRROR}/{name}.zip", path, archive.size, archive.sha256)
        except DownloadFailed as error:
            raise DownloadFailed(
                f"{error}. Run again to continue, or give a copy you have, such as that of "
                f"https://timeseriesclassification.com: --file {name}.zip"
            ) from error
    return path


def _read_package(name: str) -> dict[str, Split]:
    """A data set that sktime brings along."""
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
    with _extracted(path, [f"{name}_{part}.ts" for part in SPLITS.values()]) as folder:
        try:
            return {split: read_ts(folder / f"{name}_{part}.ts") for split, part in SPLITS.items()}
        except ValueError as error:  # named by the archive: the folder is gone when somebody reads the message
            raise ValueError(str(error).replace(f"{folder}/", f"{path}: ")) from error


@contextlib.contextmanager
def _extracted(path: Path, names: list[str]) -> Iterator[Path]:
    """A temporary folder with the files ``names`` of a zip, wherever they lie in it."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            with zipfile.ZipFile(path) as archive:
                members = {Path(info.filename).name: info for info in archive.infolist() if not info.is_dir()}
                for name in names:
                    if name not in members:
                        raise ValueError(f"{path} lacks {name}; allowed: a zip with {' and '.join(names)}")
                    (Path(temporary) / name).write_bytes(archive.read(members[name]))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read: {error}; allowed: a zip with {' and '.join(names)}") from error
        yield Path(temporary)


def _check_whole(name: str, splits: dict[str, Split], archive: Archive) -> None:
    """Raise ValueError unless the splits are those of Table 9: a file that ends early may end between two lines."""
    every = [one for split in splits.values() for one in split.series]
    found = (
        len(splits["train"].series),
        len(splits["test"].series),
        every[0].shape[1],
        max(map(len, every)),
        len({label for split in splits.values() for label in split.labels}),
    )
    for what, value, allowed in zip(Archive._fields, found, archive):
        if value != allowed:
            raise ValueError(f"{name} has {what} {value}; allowed: {allowed}, as the whole data set")
