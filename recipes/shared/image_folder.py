"""Folders of images in timm's layout: train/ and validation/, each with a folder of files for every class."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SPLITS = ("train", "validation")
#: What Pillow raises for a file that it cannot read; SyntaxError for some broken ones.
UNREADABLE = (OSError, SyntaxError, Image.DecompressionBombError)


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
    """Split -> its image files, each with the number of its class; classes in timm's order of their names: 1, 2, 10.

    Files and folders whose names begin with a dot are no images and no classes.

    Raises:
        ValueError: another layout, splits that do not have the same classes, at least two, or a class without images.
    """
    from timm.utils import natural_key

    check_layout(folder, argument)
    classes = {split: {path.name for path in _visible(folder / split) if path.is_dir()} for split in SPLITS}
    names = sorted(sorted(set.union(*classes.values())), key=natural_key)
    lacking = [f"{split}/{name}" for split in SPLITS for name in names if name not in classes[split]]
    if lacking or len(names) < 2:
        found = f"without the folders {', '.join(lacking):.200}" if lacking else f"with {len(names)} classes"
        raise ValueError(
            f"{argument} is {folder}, {found}; allowed: a folder for every class, the same ones in both of "
            f"{' and '.join(SPLITS)}, and at least two"
        )
    suffixes = Image.registered_extensions()
    files = {
        (split, name): [
            path
            for path in _visible(folder / split / name, "**/*")
            if path.suffix.lower() in suffixes and path.is_file()
        ]
        for split in SPLITS
        for name in names
    }
    if empty := ["/".join(place) for place, paths in files.items() if not paths]:
        raise ValueError(f"{argument} is {folder}, without images in {empty[0]}; allowed: images of every class")
    return {split: [(path, i) for i, name in enumerate(names) for path in files[split, name]] for split in SPLITS}


def _visible(folder: Path, pattern: str = "*") -> list[Path]:
    """The paths in ``folder`` that match ``pattern``, in order, without hidden ones and what is in them."""
    paths = sorted(folder.glob(pattern))
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def read_image(path: Path, size: int, grey: bool) -> np.ndarray:
    """Read an image file as (size, size, 1 or 3), uint8: turned upright, on white, resized and centre cropped.

    Raises:
        ValueError: the file cannot be read, or its pixels have more than 8 bits.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
                raise ValueError(f"{path} has pixels of Pillow's mode {image.mode}; allowed: 8-bit images")
            upright = _on_white(ImageOps.exif_transpose(image)).convert("RGB")  # Pillow has no L of some modes
            upright = upright.convert("L") if grey else upright
            pixels = np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC))
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: images that Pillow reads") from error
    return pixels[..., None] if grey else pixels  # (H, W) -> (H, W, 1)


def _on_white(image: Image.Image) -> Image.Image:
    """``image`` on a white ground where it is transparent."""
    if not image.has_transparency_data:
        return image
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
