"""Folders of images in timm's layout: train/ and validation/, each with a folder of files for every class."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SPLITS = ("train", "validation")


def write_stratified(folder: Path, images: np.ndarray, labels: np.ndarray, held_out: int) -> dict[str, int]:
    """Write images (N, H, W), uint8, as ``folder``/SPLIT/LABEL/NUMBER.png; returns images per split.

    ``held_out`` images are for validation, with the same share of each class.
    """
    from sklearn.model_selection import train_test_split

    members = train_test_split(np.arange(len(labels)), test_size=held_out, stratify=labels, random_state=0)
    for split, indices in zip(SPLITS, members):
        for index in indices:
            path = folder / split / str(labels[index]) / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[index]).save(path)
    return dict(zip(SPLITS, map(len, members)))


def check_layout(folder: Path, argument: str = "--data-dir") -> None:
    """Raise ValueError unless ``folder``, the value of ``argument``, has both splits."""
    for split in SPLITS:
        if not (folder / split).is_dir():
            raise ValueError(
                f"{argument} is {folder}, without the folder {split}; allowed: one with {' and '.join(SPLITS)}"
            )


def list_images(folder: Path, argument: str = "--data-dir") -> dict[str, list[tuple[Path, int]]]:
    """Split -> its image files, each with the number of its class; classes in the order of their names, as timm has it.

    Raises:
        ValueError: another layout, or splits that do not have the same classes, at least two.
    """
    check_layout(folder, argument)
    classes = {split: sorted(path.name for path in (folder / split).iterdir() if path.is_dir()) for split in SPLITS}
    names, held_out = classes.values()
    if names != held_out or len(names) < 2:
        raise ValueError(
            f"{argument} is {folder}, with {len(names)} classes in train and {len(held_out)} in validation; allowed: a "
            "folder for every class, the same ones in both, and at least two"
        )
    suffixes = Image.registered_extensions()
    return {
        split: [
            (path, number)
            for number, name in enumerate(names)
            for path in sorted((folder / split / name).rglob("*"))
            if path.suffix.lower() in suffixes
        ]
        for split in SPLITS
    }


def read_image(path: Path, size: int, grey: bool) -> np.ndarray:
    """Read an image file as (size, size, 1 or 3), uint8: turned upright, resized and centre cropped.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("L" if grey else "RGB")
            pixels = np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some broken files
        raise ValueError(f"{path} cannot be read: {error}; allowed: images that Pillow reads") from error
    return pixels[..., None] if grey else pixels  # (H, W) -> (H, W, 1)
