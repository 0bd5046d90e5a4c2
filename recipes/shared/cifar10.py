"""The archive of CIFAR-10: its check, and its images with their labels."""

import tarfile
import zlib
from pathlib import Path

import numpy as np

from .download import find_file
from .sources import SOURCES

#: Side and channels of an image, classes, and images of each file of the archive.
SIDE, CHANNELS, CLASSES = 32, 3, 10
IMAGES_PER_FILE = 10_000


def check_cifar10(path: Path) -> None:
    """Raise ValueError unless the file ``path`` is CIFAR-10's archive."""
    find_file(path, SOURCES["cifar10"], path.parent)


def read_labelled(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read CIFAR-10's training and test files: images (N, H, W, C) and labels (N,), uint8.

    Raises:
        ValueError: the archive is damaged or lacks a file.
    """
    *train_files, test_file = SOURCES["cifar10"].members
    try:
        with tarfile.open(path, "r:gz") as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}
            return {
                part: tuple(map(np.concatenate, zip(*(_read_member(archive, members, name, path) for name in names))))
                for part, names in (("train", train_files), ("test", [test_file]))
            }
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: cifar-10-binary.tar.gz") from error


def _read_member(
    archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W, C) and labels (N,) of one file, which stores a label byte and three colour planes per image."""
    if name not in members:
        raise ValueError(f"{path} lacks {name}; allowed: cifar-10-binary.tar.gz")
    content = np.frombuffer(archive.extractfile(members[name]).read(), np.uint8)
    if content.size != IMAGES_PER_FILE * (1 + SIDE * SIDE * CHANNELS):
        raise ValueError(
            f"{path}: {name} has {content.size:,} bytes; allowed: {IMAGES_PER_FILE * (1 + SIDE * SIDE * CHANNELS):,}"
        )
    records = content.reshape(IMAGES_PER_FILE, 1 + SIDE * SIDE * CHANNELS)
    if records[:, 0].max() >= CLASSES:
        raise ValueError(f"{path}: {name} has the label {records[:, 0].max()}; allowed: 0..{CLASSES - 1}")
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, 0]  # (N, C, H, W) -> (N, H, W, C)
