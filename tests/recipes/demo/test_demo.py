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


def test_the_quick_demo_shows_every_model_and_goes_on_where_it_was(imported_already, tmp_path, monkeypatch, capsys):
    """Two of its language models; each is trained for seconds."""
    monkeypatch.setattr(
        text, "ARCHITECTURES", {name: text.ARCHITECTURES[name] for name in ("flowformer_lm", "softmax_lm")}
    )
    out = tmp_path / "out"
    demo.main(["--quick", "--out", str(out)])
    shown = (out / "results.md").read_text()
    assert shown.strip() in capsys.readouterr().out and (out / "demo.png").stat().st_size > 20_000
    rows = json.loads((out / "results.json").read_text())
    assert [row["model"] for row in rows] == list(text.ARCHITECTURES)
    for row in rows:
        assert len(re.findall(rf"^\| {row['model']} +\|", shown, re.MULTILINE)) == 2
        assert row["parameters"] > 4e6 and 0 < row["bits per byte"] < np.log2(row["perplexity"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("checkpoint*")}
    demo.main(["--quick", "--out", str(out)])
    assert before and {path: path.stat().st_mtime_ns for path in out.rglob("checkpoint*")} == before


def test_the_loop_learns_and_writes_timms_files(tmp_path):
    folder = tmp_path / "digits"
    assert folders.write_digits(folder) == {"train": 1437, "validation": 360}
    pixels = np.asarray(Image.open(next((folder / "train" / "0").iterdir())))
    assert pixels.shape == (32, 32) and pixels[8:24, 12:20].mean() < pixels[8:24].mean()  # a zero is hollow
    words = f"--data-dir {folder} --device-modules timm_plugin --model {images.MODEL} --num-classes 10 --epochs 2 "
    words += f"--warmup-epochs 0 --workers 0 --lr 2e-3 --scale 0.7 1 --hflip 0 --color-jitter 0 --output {tmp_path} "
    words += "--experiment x"
    train_digits.main(words.split())
    summary = pd.read_csv(tmp_path / "x" / "summary.csv")
    assert list(summary.epoch) == [0, 1] and summary.train_loss[1] < summary.train_loss[0]
    assert summary.eval_top1[1] > 30  # chance is 10
    assert (tmp_path / "x" / "model_best.pth.tar").exists()
    parameters, top1, maps = images.examine(tmp_path / "x" / "last.pth.tar", folder, digits_shown=4)
    assert 0.5e6 < parameters < 1e6 and top1 == pytest.approx(summary.eval_top1[1], abs=0.5)
    assert maps.labels == [0, 3, 6, 9] and maps.competition.shape == maps.allocation.shape == (4, 8, 8)
    assert maps.competition.mean((1, 2)).numpy() == pytest.approx(np.ones(4), abs=1e-4)  # fractions of an even share
    with pytest.raises(SystemExit, match="allowed: a new folder"):
        train_digits.main(words.split())
