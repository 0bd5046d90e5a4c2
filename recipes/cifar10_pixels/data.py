"""Write CIFAR-10 as sequences of subpixels: ``python -m recipes.cifar10_pixels.data`` from the checkout's root.

torchvision downloads and checks it. ``--images`` uses any folder of images, to try the commands.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from fairseq.data import indexed_dataset
from PIL import Image
from torchvision.datasets import CIFAR10
from tqdm import tqdm

from fairseq_plugin.data.indexed_sums import write_sums
from fairseq_plugin.data.pixels import FIRST_TOKEN, ImageShape, pixel_dictionary

from ..images import read_image

#: The last images of the training files are held out for validation.
HELD_OUT = 1_000


def folder_splits(folder: Path) -> dict[str, list[Path]]:
    """The image files below a folder, 90, 5 and 5 per cent, in the order of a hash of their names."""
    suffixes = Image.registered_extensions()
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file()]
    if len(paths) < 20:
        raise SystemExit(f"--images is {folder} with {len(paths)} images; allowed: at least 20")
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).hexdigest())
    train, valid = round(0.9 * len(paths)), round(0.95 * len(paths))
    return {"train": paths[:train], "valid": paths[train:valid], "test": paths[valid:]}


def write(folder: Path, splits: dict[str, Sequence], shape: ImageShape, read: Callable = np.asarray) -> None:
    """Write a data set of fairseq; the shape, in a file, is written last."""
    folder.mkdir(parents=True)
    dictionary = pixel_dictionary()
    dictionary.save(str(folder / "dict.txt"))
    for split, images in splits.items():
        prefix = str(folder / split)
        builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionary))
        for image in tqdm(images, split, unit=" images", disable=None):
            builder.add_item(torch.from_numpy(read(image).reshape(-1).astype(np.int32) + FIRST_TOKEN))  # (T,)
        builder.finalize(f"{prefix}.idx")
        write_sums(folder / split)
        print(f"  {split:<5}  {len(images):6,d} images  {len(images) * shape.length:11,d} subpixels")
    shape.save(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/cifar10_pixels"), help="default: %(default)s")
    parser.add_argument("--root", type=Path, help="where torchvision keeps CIFAR-10, or downloads it; default: --out")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="images for a trial, in place of CIFAR-10")
    parser.add_argument("--size", type=int, default=32, help="side of the images of --images (%(default)s)")
    parser.add_argument("--grey", action="store_true", help="one channel in place of three, of the images of --images")
    options = parser.parse_args(arguments)
    if (options.out / "data-bin").exists():
        parser.error(f"--out is {options.out}, which has a data-bin; allowed: a folder without one")
    if options.images:
        shape = ImageShape(options.size, options.size, 1 if options.grey else 3)
        splits, read = folder_splits(options.images), lambda path: read_image(path, options.size, options.grey)
    else:
        shape, read = ImageShape(32, 32, 3), np.asarray
        train, test = (CIFAR10(options.root or options.out, train=part, download=True).data for part in (True, False))
        splits = {"train": train[:-HELD_OUT], "valid": train[-HELD_OUT:], "test": test}
    write(options.out / "data-bin", splits, shape, read)
    print(f"Ready: {options.out / 'data-bin'}. The commands to train with are in recipes/cifar10_pixels/README.md.")


if __name__ == "__main__":
    main()
