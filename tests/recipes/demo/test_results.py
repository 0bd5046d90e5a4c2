"""The table and the picture, from small synthetic results."""

import json
import os
from importlib import metadata

import numpy as np
import pytest
from PIL import Image

from recipes.demo import picture, results
from recipes.demo.images import Epoch, ImageResult, Maps
from recipes.demo.text import ARCHITECTURES, LanguageModel, TextResult
from recipes.shared import tables
from recipes.shared.commands import Finished
from recipes.shared.fairseq_log import Evaluation, Point
from recipes.shared.tables import Run

SPEEDS = {
    "flowformer_lm": {512: 2000.0, 2048: 2000.0, 8192: 2000.0},
    "softmax_lm": {512: 2500.0, 2048: 2100.0, 8192: 900.0},
    "transformer_lm": {512: 2400.0, 2048: 1500.0, 8192: 500.0},
}
RUN = Run("python -m recipes.demo", "2 CPU cores", "Python 3.11", "2026-11-20", 7.5)


@pytest.fixture
def text():
    points = [
        Point("train_inner", 1, update, {"loss": 12.0 - update / 10, "wall": float(update)})
        for update in range(5, 31, 5)
    ] + [Point("valid", 1, 30, {"loss": 9.1, "wall": 30.0})]
    models = [
        LanguageModel(name, 4_680_448, points, Finished(60.0, 2**30), Evaluation(100, 7.0, 128.0), 2.1, 2000.0 + i)
        for i, name in enumerate(ARCHITECTURES)
    ]
    sizes = {"train": 900, "valid": 50, "test": 340}
    return TextResult(models, {"train": 9, "valid": 1, "test": 2}, sizes, dict(sizes, test=100), ["def f():\n    pass"])


@pytest.fixture
def images():
    maps = Maps([3, 8], [3, 5], np.zeros((2, 32, 32)), np.ones((2, 8, 8)), np.full((2, 8, 8), 0.7), "stages.0")
    epochs = [Epoch(i, 2.0 / (i + 1), 1.8 / (i + 1), 90.0 + i) for i in range(3)]
    return ImageResult(
        797_002, {"train": 1437, "validation": 360}, epochs, Finished(40.0, 2**29), "a loop", 98.61, maps
    )


def test_text_table(text, images):
    plain = tables.as_text(results.tables(text, SPEEDS, images), RUN)
    lines = plain.splitlines()
    assert "flowformer_lm" in plain
    assert "1,024 MiB" in plain
    assert "98.6 %" in plain
    assert any(line.split()[0] == "softmax_lm" and line.endswith("900") for line in lines if line.split())
    assert "slower at 512, 2,048" in plain  # not hidden
    assert lines[-3:] == ["python -m recipes.demo, 7.5 minutes, 2026-11-20", "2 CPU cores", "Python 3.11"]
    header = next(line for line in lines if "perplexity" in line)
    row = next(line for line in lines if "transformer_lm" in line)
    assert header.index("perplexity") + len("perplexity") == row.index("128.0") + len("128.0")  # aligned right


def test_a_run_says_its_machine_versions_and_minutes():
    run = tables.describe_run("python -m recipes.demo", 90.0)
    assert run.command == "python -m recipes.demo" and run.minutes == 1.5
    assert run.machine.startswith(f"{os.cpu_count()} CPU cores")
    assert {f"{name} {metadata.version(name)}" for name in ("torch", "timm")} <= set(run.versions.split(", "))


def test_written_files(text, images, tmp_path):
    plain = results.write(tmp_path, text, SPEEDS, images, RUN)
    assert (tmp_path / "results.txt").read_text() == plain + "\n"
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["run"]["machine"] == "2 CPU cores"
    assert content["text"]["models"][0]["test"] == {"tokens": 100, "bits_per_token": 7.0, "perplexity": 128.0}
    assert content["text"]["models"][0]["curves"]["valid"] == [[30, 9.1, 30.0]]
    assert content["images"]["epochs"][2]["top1"] == 92.0
    rows = [line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith("| flowformer_lm")]
    assert len(rows) == 2
    assert all(row.endswith(" |") for row in rows)


@pytest.mark.parametrize("peer, length", [("softmax_lm", 8192), ("transformer_lm", 2048)])
def test_break_even(peer, length):
    assert tables.break_even(SPEEDS, "flowformer_lm", peer) == length


def test_read_speeds():
    lines = ["a warning", '{"architecture": "softmax_lm", "length": 512, "tokens_per_second": 10.5}']
    assert results.read_speeds(lines) == {"softmax_lm": {512: 10.5}}


def test_picture(text, images, tmp_path):
    picture.draw(text, images, tmp_path / "demo.png")
    with Image.open(tmp_path / "demo.png") as image:
        assert image.width > 1000
        assert image.height > 800
        assert len(image.convert("RGB").getcolors(maxcolors=2**24)) > 50
