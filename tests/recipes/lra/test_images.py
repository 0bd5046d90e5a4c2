"""Image and Pathfinder: pixels as tokens, including black ones, the splits, and damaged files."""

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from PIL import Image

from fairseq_plugin.data.pixels import FIRST_TOKEN
from recipes.lra import image, pathfinder
from recipes.shared import cifar10
from recipes.shared.download import Source
from recipes.shared.sources import SOURCES
from tests.recipes.archive_files import tarred


def read(data_bin, kind, split):
    dictionary = Dictionary.load(str(data_bin / kind / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(data_bin / kind / split), dictionary)
    assert len(dictionary) == len(Dictionary()) + (256 if kind == "input0" else dataset_classes(data_bin))
    return [(dataset[i] - FIRST_TOKEN).numpy() for i in range(len(dataset))]


def dataset_classes(data_bin):
    return len((data_bin / "label" / "dict.txt").read_text().splitlines())


def test_grey_is_rounded_down():
    """0.2989 R + 0.587 G + 0.114 B: white is 254 in float32, since the weights sum to 0.9999."""
    pixels = np.array([[[255, 255, 255], [0, 0, 0], [255, 0, 0], [10, 20, 30]]], np.uint8)
    assert image.to_grey(pixels).tolist() == [[254, 0, 76, 18]]


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """An archive in CIFAR-10's format with 20 images per file instead of 10,000."""
    monkeypatch.setattr(cifar10, "IMAGES_PER_FILE", 20)
    monkeypatch.setattr(image, "HELD_OUT", 10)
    files = {}
    for value, name in enumerate(SOURCES["cifar10"].members):
        records = np.full((20, 1 + 3072), 10 * value, np.uint8)
        records[:, 0] = np.arange(20) % 10
        files[f"cifar-10-batches-bin/{name}"] = records.tobytes()
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(tarred(files))
    monkeypatch.setitem(
        SOURCES, "cifar10", Source("https://publisher/cifar.tar.gz", members=SOURCES["cifar10"].members)
    )
    return path


def test_cifar(small_cifar, tmp_path):
    assert image.main(["--file", str(small_cifar), "--out", str(tmp_path / "out")]) == 0
    data_bin = tmp_path / "out" / "data-bin"
    splits = {split: read(data_bin, "input0", split) for split in ("train", "valid", "test")}
    assert [len(splits[split]) for split in splits] == [90, 10, 20]
    assert all(sequence.shape == (1024,) for sequence in splits["train"])
    assert splits["train"][0].tolist() == [0] * 1024  # black pixels are tokens
    assert set(splits["valid"][0]) == {39} and set(splits["test"][0]) == {49}  # 40 and 50, times 0.9999
    assert [int(label[0]) for label in read(data_bin, "label", "valid")] == [*range(10)]


@pytest.fixture
def release(tmp_path):
    """20 images in Pathfinder's format, in two folders with two metadata files; one image is empty."""
    folder = tmp_path / "lra_release" / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    for part in (10, 9):
        (folder / "imgs" / str(part)).mkdir(parents=True)
        lines = []
        for number in range(11 if part == 9 else 10):
            path = folder / "imgs" / str(part) / f"sample_{number}.png"
            Image.fromarray(np.full((32, 32), 20 * number + part, np.uint8)).save(path)
            lines.append(f"imgs/{part} sample_{number}.png {number} {number % 2} 1 1.0\n")
        (folder / "metadata" / f"{part}.npy").write_text("".join(lines))
    (folder / "imgs" / "9" / "sample_10.png").write_bytes(b"")
    return folder


def test_pathfinder(release, tmp_path):
    assert pathfinder.main(["--file", str(release.parents[1]), "--out", str(tmp_path / "out")]) == 0
    data_bin = tmp_path / "out" / "data-bin"
    sequences = [sequence for split in ("train", "valid", "test") for sequence in read(data_bin, "input0", split)]
    # In numerical order of 9 and 10, not alphabetical.
    assert [int(sequence[0]) for sequence in sequences] == [20 * i + part for part in (9, 10) for i in range(10)]
    assert [len(read(data_bin, "label", split)) for split in ("train", "valid", "test")] == [16, 2, 2]
    assert [int(label[0]) for label in read(data_bin, "label", "test")] == [0, 1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "metadata" / "9.npy").write_text("imgs/9 sample_0.png 0 2\n"), "line 1.*label 0 or 1"),
        (lambda f: (f / "metadata" / "9.npy").write_text("imgs/9 none.png 0 1\n"), "line 1.*does not exist"),
        (lambda f: (f / "imgs" / "9" / "sample_3.png").write_bytes(b"no image"), "sample_3.png cannot be read"),
        (lambda f: Image.new("L", (8, 8)).save(f / "imgs" / "9" / "sample_3.png"), "of .8, 8. pixels"),
        (lambda f: [path.unlink() for path in (f / "metadata").iterdir()], "has no metadata"),
    ],
)
def test_damaged_pathfinder(release, tmp_path, capsys, damage, said):
    damage(release)
    assert pathfinder.main(["--file", str(release.parents[1]), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "allowed" in message and not (tmp_path / "out" / "data-bin").exists()
    with pytest.raises(ValueError, match=said):
        [*pathfinder.examples(pathfinder.read_pictures(release))]


def test_a_folder_that_is_no_release(tmp_path, capsys):
    assert pathfinder.main(["--file", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "has 0 pathfinder32/curv_contour_length_14; allowed" in capsys.readouterr().err
