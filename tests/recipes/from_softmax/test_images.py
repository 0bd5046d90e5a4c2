"""The image half: once from the digits to the results at a tiny size, its archive, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.from_softmax import images
from recipes.from_softmax.forms import Windows, form
from recipes.from_softmax.image_models import build, exchange
from recipes.from_softmax.parts import PARTS
from recipes.from_softmax.stages import DISTILLED, EXCHANGED, SCRATCH, TRANSFERRED

TINY = "--quick --seeds 1 --width 8 --layers 2 --heads 2 --epochs 10 --window 8".split()


def write_few(folder: Path) -> None:
    """128 images to learn from and 64 held out, in place of the digits."""
    drawn = np.random.default_rng(0)
    sizes = {"train": 128, "test": 64}
    pixels = {part: drawn.integers(0, 256, (size, 32, 32, 3), np.uint8) for part, size in sizes.items()}
    images.write_labelled({part: (x, np.arange(len(x)) % 10) for part, x in pixels.items()}, folder)


def test_from_images_to_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms of one teacher; a second time nothing is trained."""
    monkeypatch.setattr(images, "write_digits", write_few)
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--models", "lolcats,softmax", "linear", *TINY]
    assert images.main(arguments) == 0
    content = json.loads((out / "results.json").read_text())
    teacher, windowed, linear = content["results"]
    assert windowed["model"] == "lolcats,softmax" and linear["model"] == "linear"
    for one in (windowed, linear):
        assert {*one["losses"]} == {EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH}
        assert one["teacher"] == teacher["losses"]
        assert one["losses"][DISTILLED] != one["losses"][TRANSFERRED] != one["losses"][EXCHANGED]
    assert {*windowed["parts"]} == {*PARTS} and windowed["parts"]["whole"] == windowed["losses"][DISTILLED]
    assert not linear["parts"]
    # In one layer of two, maps of queries and keys of 2 rows and 4 channels and a gate, of 2 heads; all projections.
    assert windowed["learned"] == 2 * (2 * 2 * 4 + 1)
    assert linear["learned"] == 2 * (8 * 24 + 24)
    monkeypatch.setattr(images, "train", None)
    monkeypatch.setattr(images, "losses", None)
    assert images.main(arguments) == 0
    assert json.loads((out / "results.json").read_text())["results"] == content["results"]


def test_exchange_keeps_the_weights() -> None:
    plan = dict(width=8, layers=2, heads=2)
    stock, hedgehog = build(**plan, seed=1), form("hedgehog,softmax", 2, Windows(8))
    ours = exchange(build(**plan, seed=1), hedgehog)
    weights = ours.state_dict()
    assert all(torch.equal(weights[name], x) for name, x in stock.state_dict().items())
    assert {name for name, _ in ours.named_parameters()} - {name for name, _ in stock.named_parameters()}
    assert not torch.equal(build(**plan, seed=2).patch_embed.proj.weight, stock.patch_embed.proj.weight)


def test_an_archive_becomes_a_folder_of_images(tmp_path: Path) -> None:
    pixels = np.arange(3 * 32 * 32 * 3, dtype=np.uint8).reshape(3, 32, 32, 3)
    labels = np.array([4, 9, 4], np.uint8)
    images.write_labelled({"train": (pixels, labels), "test": (pixels[:1], labels[:1])}, tmp_path)
    assert sorted(path.name for path in (tmp_path / "train" / "4").iterdir()) == ["00000.png", "00002.png"]
    with Image.open(tmp_path / "validation" / "4" / "00000.png") as image:
        assert np.array_equal(np.asarray(image), pixels[0])


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Before anything is trained."""
    out, archive = tmp_path / "out", tmp_path / "any.tar.gz"
    archive.write_bytes(b"no archive")
    cases = {
        "--epochs 4": "--epochs is 4",
        "--transfer-share 1": "--transfer-share is 1",
        "--layers 2": "flow*3,softmax",
        f"--cifar10 {archive}": "10 bytes; allowed: 170,052,171",
    }
    for wrong, said in cases.items():
        assert images.main(["--out", str(out), *wrong.split()]) == 1
        assert said in capsys.readouterr().err
    assert not (out / "results.json").exists()
