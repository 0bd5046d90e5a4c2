"""Images: once from the digits to the results at a tiny size, and CIFAR-10 as a folder of images."""

import json

import numpy as np
import pytest
from PIL import Image

from recipes.from_softmax import images
from recipes.from_softmax.forms import PARTS
from recipes.from_softmax.stages import STAGES
from recipes.images import write_images

TINY = "--quick --seeds 1 --width 8 --layers 2 --heads 2 --window 8 --models lolcats,softmax linear".split()


def test_from_images_to_the_results(tmp_path, monkeypatch):
    """Two forms of one teacher; a second time nothing is trained; other options are refused."""
    pixels = np.random.default_rng(0).integers(0, 256, (192, 32, 32), np.uint8)
    monkeypatch.setattr(images, "write_digits", lambda folder: write_images(folder, pixels, np.arange(192) % 10, 64))
    out = tmp_path / "out"
    images.main(["--out", str(out), *TINY])
    windowed, linear = results = json.loads((out / "results.json").read_text())
    for one in results:
        assert all(0 <= one[stage] <= 100 for stage in ("teacher", *STAGES)) and one["teacher"] == linear["teacher"]
    # In one layer of two, maps of queries and keys of 2 rows and 4 channels and a gate, of 2 heads; all projections.
    assert windowed["learned"] == 2 * (2 * 2 * 4 + 1) and linear["learned"] == 2 * (8 * 24 + 24)
    assert windowed["whole"] == windowed["after stage 2"] and {linear[part] for part in PARTS} == {None}
    monkeypatch.setattr(images, "train", None)
    monkeypatch.setattr(images, "error", None)
    images.main(["--out", str(out), *TINY])
    assert json.loads((out / "results.json").read_text()) == results and (out / "results.png").exists()
    with pytest.raises(SystemExit, match="begun with"):
        images.main(["--out", str(out), *TINY, "--lr", "1"])


def test_cifar10_becomes_a_folder_of_images(tmp_path, monkeypatch):
    pixels = np.arange(3 * 32 * 32 * 3, dtype=np.uint8).reshape(3, 32, 32, 3)
    data = list(zip(map(Image.fromarray, pixels), (4, 9, 4)))
    monkeypatch.setattr(images, "CIFAR10", lambda root, train, download: data if train else data[:1])
    for _ in range(2):
        images.write_cifar10(tmp_path / "images", tmp_path)
    assert [path.name for path in sorted((tmp_path / "images" / "train" / "4").iterdir())] == ["00000.png", "00002.png"]
    with Image.open(tmp_path / "images" / "validation" / "4" / "00000.png") as image:
        assert np.array_equal(np.asarray(image), pixels[0])
