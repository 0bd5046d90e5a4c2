"""The digits as an image folder, the training loop of timm's parts, and reading its results."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from recipes.demo import __main__ as demo
from recipes.demo import images, train_digits
from recipes.shared.digits import VALIDATION_DIGITS, write_digits
from recipes.shared.image_training import validate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The image folder."""
    folder = tmp_path_factory.mktemp("digits")
    assert write_digits(folder) == {"train": 1797 - VALIDATION_DIGITS, "validation": VALIDATION_DIGITS}
    return folder


def test_splits_are_stratified(folder):
    for digit in range(10):
        counts = [len(list((folder / split / str(digit)).iterdir())) for split in ("train", "validation")]
        assert counts[1] / sum(counts) == pytest.approx(0.2, abs=0.01)


def test_images_are_the_digits(folder):
    path = next((folder / "train" / "0").iterdir())
    image = Image.open(path)
    assert image.size == (32, 32)
    pixels = np.asarray(image)
    assert pixels.min() < 20
    assert pixels.max() > 220
    assert pixels[8:24, 12:20].mean() < pixels[8:24].mean()  # a zero is hollow


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The folder of a run of two epochs."""
    out = tmp_path_factory.mktemp("run")
    arguments = ["--data-dir", str(folder), "--device-modules", "timm_plugin", "--model", images.MODEL]
    arguments += ["--num-classes", "10", "--epochs", "2", "--warmup-epochs", "0", "--lr", "2e-3", "--workers", "0"]
    arguments += [
        "--scale",
        "0.7",
        "1",
        "--hflip",
        "0",
        "--color-jitter",
        "0",
        "--output",
        str(out),
        "--experiment",
        "x",
    ]
    assert train_digits.main(arguments) == 0
    return out / "x"


def test_loop_learns_and_writes_timms_files(trained):
    epochs = images.read_summary(trained / "summary.csv")
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert epochs[1].train_loss < epochs[0].train_loss
    assert epochs[1].top1 > 30  # chance is 10
    assert {"last.pth.tar", "model_best.pth.tar"} <= {path.name for path in trained.iterdir()}


def test_checkpoint_is_examined_as_the_loop_left_it(trained, folder):
    parameters, top1, maps = images.examine(trained / "last.pth.tar", folder, digits_shown=4)
    assert 0.5e6 < parameters < 1e6
    assert top1 == pytest.approx(images.read_summary(trained / "summary.csv")[-1].top1, abs=0.5)
    assert maps.labels == [0, 3, 6, 9]
    assert maps.images.shape == (4, 32, 32)
    assert maps.competition.shape == maps.allocation.shape == (4, 8, 8)
    assert maps.competition.mean((1, 2)) == pytest.approx(np.ones(4), abs=1e-4)  # fractions of an even share
    assert 0 < maps.allocation.min() < maps.allocation.max() < 1


def test_a_training_is_its_seeds(folder, tmp_path):
    """Training on 32 digits is determined by the seed."""
    for split in ("train", "validation"):
        for digit in (0, 1):
            (tmp_path / split / str(digit)).mkdir(parents=True)
            for path in sorted((folder / split / str(digit)).iterdir())[:8]:
                (tmp_path / split / str(digit) / path.name).symlink_to(path)
    summaries = []
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        arguments = ["--data-dir", str(tmp_path), "--model", images.MODEL, "--device-modules", "timm_plugin"]
        arguments += ["--num-classes", "10", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "8"]
        arguments += ["--workers", "0", "--seed", seed, "--output", str(tmp_path / "out"), "--experiment", name]
        assert train_digits.main(arguments) == 0
        summaries.append(images.read_summary(tmp_path / "out" / name / "summary.csv"))
    assert summaries[0] == summaries[1] and summaries[0][0].train_loss != summaries[2][0].train_loss


def test_nothing_is_dropped_in_validation():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 10)).train()
    pixels, labels = torch.randn(6, 3, 2, 2), torch.arange(6)
    loss = validate(model, [(pixels, labels)])["loss"]
    assert loss == pytest.approx(nn.functional.cross_entropy(model[2](pixels.flatten(1)), labels).item())


def test_missing_scripts_are_said_before_anything_is_done(tmp_path, capsys):
    assert demo.main(["--timm-scripts", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "allowed: a folder that holds timm's train.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
