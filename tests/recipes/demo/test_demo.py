"""The demo: its whole quick flow from two sides, and the training loop of timm's parts."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from recipes import images as folders
from recipes.demo import __main__ as demo
from recipes.demo import images, text, train_digits


def test_the_quick_demo_shows_every_model_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Two of its language models; each is trained for seconds."""
    monkeypatch.setattr(
        text, "ARCHITECTURES", {name: text.ARCHITECTURES[name] for name in ("flowformer_lm", "softmax_lm")}
    )
    out = tmp_path / "out"
    assert demo.main(["--quick", "--out", str(out)]) == 0
    shown = (out / "results.md").read_text()
    assert shown.strip() in capsys.readouterr().out and (out / "demo.png").stat().st_size > 20_000
    rows = json.loads((out / "results.json").read_text())
    assert [row["model"] for row in rows] == list(text.ARCHITECTURES)
    for row in rows:
        assert len(re.findall(rf"^\| {row['model']} +\|", shown, re.MULTILINE)) == 2
        assert row["parameters"] > 4e6 and 0 < row["bits per byte"] < np.log2(row["perplexity"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("checkpoint*")}
    assert demo.main(["--quick", "--out", str(out)]) == 0
    assert before and {path: path.stat().st_mtime_ns for path in out.rglob("checkpoint*")} == before


def test_missing_scripts_are_said_before_anything_is_done(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--timm-scripts", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "allowed: a folder that holds timm's train.py" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The digits as a folder of images."""
    folder = tmp_path_factory.mktemp("digits") / "digits"
    assert folders.write_digits(folder) == {"train": 1437, "validation": 360}
    return folder


def train(folder, out, name, *options):
    words = [
        "--data-dir",
        str(folder),
        "--device-modules",
        "timm_plugin",
        "--model",
        images.MODEL,
        "--num-classes",
        "10",
    ]
    words += ["--warmup-epochs", "0", "--workers", "0", "--output", str(out), "--experiment", name, *options]
    train_digits.main(words)
    return pd.read_csv(out / name / "summary.csv")


def test_the_loop_learns_and_writes_timms_files(folder, tmp_path):
    pixels = np.asarray(Image.open(next((folder / "train" / "0").iterdir())))
    assert pixels.shape == (32, 32) and pixels[8:24, 12:20].mean() < pixels[8:24].mean()  # a zero is hollow
    gentle = ("--lr", "2e-3", "--scale", "0.7", "1", "--hflip", "0", "--color-jitter", "0", "--epochs", "2")
    summary = train(folder, tmp_path, "x", *gentle)
    assert list(summary.epoch) == [0, 1] and summary.train_loss[1] < summary.train_loss[0]
    assert summary.eval_top1[1] > 30  # chance is 10
    assert (tmp_path / "x" / "model_best.pth.tar").exists()
    parameters, top1, maps = images.examine(tmp_path / "x" / "last.pth.tar", folder, digits_shown=4)
    assert 0.5e6 < parameters < 1e6 and top1 == pytest.approx(summary.eval_top1[1], abs=0.5)
    assert maps.labels == [0, 3, 6, 9] and maps.competition.shape == maps.allocation.shape == (4, 8, 8)
    assert maps.competition.mean((1, 2)) == pytest.approx(np.ones(4), abs=1e-4)  # fractions of an even share
    with pytest.raises(SystemExit, match="allowed: a new folder"):
        train(folder, tmp_path, "x", *gentle)
