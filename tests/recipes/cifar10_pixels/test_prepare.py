"""CIFAR-10 and image folders: every source gives the right subpixels in the right order."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset
from PIL import Image

from fairseq_plugin.data.pixels import ImageShape, to_images
from recipes.cifar10_pixels import prepare
from recipes.shared import cifar10
from recipes.shared.sources import SOURCES
from tests.recipes.archive_files import tarred
from tests.recipes.server import sha256

PER_FILE = 6
FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def records(name: str, label: int = 9) -> np.ndarray:
    """The bytes of one file of the archive (N, 1 + 3072)."""
    content = np.random.default_rng(sum(name.encode())).integers(0, 256, (PER_FILE, 3073)).astype(np.uint8)
    content[:, 0] = label
    return content


def archive(names=FILES, label: int = 9, cut: int = 0) -> bytes:
    """An archive in CIFAR-10's layout; files lack their last ``cut`` bytes."""
    contents = {name: records(name, label).tobytes() for name in ["batches.meta.txt", *names]}
    return tarred({f"cifar-10-batches-bin/{name}": content[: len(content) - cut] for name, content in contents.items()})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Accept files of six images as CIFAR-10; returns their archive."""
    content = archive()
    monkeypatch.setattr(cifar10, "IMAGES_PER_FILE", PER_FILE)
    monkeypatch.setattr(prepare, "HELD_OUT", 4)
    count(monkeypatch, content)
    return content


def count(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Accept ``content`` as the archive."""
    source = SOURCES["cifar10"]._replace(size=len(content), sha256=sha256(content))
    monkeypatch.setitem(SOURCES, "cifar10", source)


def images(data_bin: Path, split: str) -> np.ndarray:
    """The images (N, H, W, C) of a split as fairseq's loader reads them."""
    dataset = indexed_dataset.make_dataset(str(data_bin / split), "mmap")
    tokens = torch.stack([dataset[index] for index in range(len(dataset))])
    return to_images(tokens, ImageShape.load(data_bin)).numpy()


def assert_cifar10(data_bin: Path) -> None:
    """Assert that the data set equals the images of ``records``; the last training images are held out."""
    train = np.concatenate([records(name) for name in FILES[:5]])[:, 1:]
    expected = {"train": train[:-4], "valid": train[-4:], "test": records("test_batch.bin")[:, 1:]}
    for split, planes in expected.items():
        stored = images(data_bin, split)
        assert stored.shape == (len(planes), 32, 32, 3)
        for y, x, c in [(0, 0, 0), (0, 0, 2), (0, 31, 1), (17, 5, 2), (31, 31, 2)]:
            assert np.array_equal(stored[:, y, x, c], planes[:, c * 1024 + y * 32 + x])
        assert np.array_equal(stored.sum((1, 2, 3)), planes.sum(1, dtype=np.int64))


def test_the_archive_is_that_of_its_publisher() -> None:
    """50,000 images for training, some of them held out, and 10,000 for the test."""
    assert len(SOURCES["cifar10"].members) * cifar10.IMAGES_PER_FILE == 60_000
    assert prepare.SHAPE.length == 3072 and prepare.HELD_OUT == 1000


def test_local_copy(small: bytes, tmp_path: Path, capsys) -> None:
    """A local copy may have any name."""
    (tmp_path / "mine").write_bytes(small)
    assert prepare.main(["--file", str(tmp_path / "mine"), "--out", str(tmp_path / "out")]) == 0
    assert_cifar10(tmp_path / "out" / "data-bin")
    assert re.search(r"train +26 images +79,872 subpixels, 3072 an image", capsys.readouterr().out)


@pytest.mark.parametrize(
    "content, message",
    [
        (archive(FILES[:4] + FILES[5:]), "lacks data_batch_5.bin"),
        (archive(cut=1), "data_batch_1.bin has 18,437 bytes; allowed: 18,438"),
        (archive(label=10), "data_batch_1.bin has the label 10; allowed: 0..9"),
        (archive()[:5000], "cannot be read"),
        (b"no archive", "cannot be read"),
    ],
)
def test_archives_that_are_refused(small: bytes, monkeypatch, tmp_path: Path, capsys, content, message) -> None:
    """Malformed archives are reported even if their checksum is right."""
    count(monkeypatch, content)
    (tmp_path / "mine").write_bytes(content)
    assert prepare.main(["--file", str(tmp_path / "mine"), "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 images in subfolders: left red, right blue, a white line on top; wider than high. Also other files."""
    for index in range(40):
        pixels = np.zeros((20, 44, 3), np.uint8)
        pixels[:, :22, 0], pixels[:, 22:, 2], pixels[0] = 250, 6 * index, 255
        path = tmp_path / "images" / f"class{index % 3}" / f"{index}.{['png', 'bmp', 'PNG'][index % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_folder_of_images(folder: Path, tmp_path: Path) -> None:
    """Every image is in one split; resized, centre-cropped, in colour or grey."""
    arguments = ["--images", str(folder), "--size", "10", "--out", str(tmp_path / "out")]
    assert prepare.main([*arguments, "--grey"]) == 0
    assert ImageShape.load(tmp_path / "out" / "data-bin") == (10, 10, 1)
    grey = images(tmp_path / "out" / "data-bin", "train")
    assert grey.shape == (36, 10, 10, 1) and abs(grey[:, 5, 1, 0] - 75).max() <= 3  # Pillow's red: 0.299 of 250
    assert prepare.main(arguments) == 0
    splits = {split: images(tmp_path / "out" / "data-bin", split) for split in ("train", "valid", "test")}
    assert [len(splits[split]) for split in splits] == [36, 2, 2]
    whole = np.concatenate(list(splits.values()))
    assert whole.shape[1:] == (10, 10, 3)
    assert abs(whole[:, 5, 1] - [250, 0, 0]).max() <= 3
    assert sorted(whole[:, 5, 8, 2].tolist()) == [6 * index for index in range(40)]
    assert (whole[:, 0, :, 1] > whole[:, 1, :, 1] + 50).all()


def test_split_is_by_name(folder: Path, tmp_path: Path) -> None:
    """The split depends neither on the files' content nor on the folder's location."""
    splits = prepare.read_folder(folder, 4, grey=False)
    names = {split: np.stack([*images.images])[:, 2, 3, 2] for split, images in splits.items()}
    moved = folder.rename(tmp_path / "elsewhere")
    moved_splits = prepare.read_folder(moved, 4, grey=False)
    assert all(np.array_equal(np.stack([*moved_splits[split].images])[:, 2, 3, 2], names[split]) for split in names)


def test_turned_photographs_are_put_upright(tmp_path: Path) -> None:
    """Photographs are rotated by their EXIF orientation."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    image = prepare.read_image(tmp_path / "a.png", 8, grey=True)
    assert image.shape == (8, 8, 1) and (image[:4] == 255).all() and (image[4:] == 0).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--images", "{}/none"], "--images is .*none.*; allowed"),
        (["--images", "{}/images/class0"], "with 14 images; allowed: at least 20"),
        (["--size", "16"], "--size or --grey .*without --images"),
        (["--file", "x", "--grey"], "--size or --grey .*without --images"),
    ],
)
def test_bad_arguments(folder: Path, tmp_path: Path, capsys, arguments, message: str) -> None:
    """Reported before anything is written."""
    assert prepare.main([*(a.format(tmp_path) for a in arguments), "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_broken_image(folder: Path, tmp_path: Path, capsys) -> None:
    """The error names the file, and an earlier data set is unchanged."""
    arguments = ["--images", str(folder), "--size", "4", "--out", str(tmp_path / "out")]
    assert prepare.main(arguments) == 0
    before = images(tmp_path / "out" / "data-bin", "train")
    broken = folder / "class0" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    assert prepare.main(arguments) == 1
    assert re.search(r"class0/0.png .*; allowed", capsys.readouterr().err)
    assert np.array_equal(images(tmp_path / "out" / "data-bin", "train"), before)
