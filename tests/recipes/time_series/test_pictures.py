"""Pictures of competition and allocation over a series, from a checkpoint of fairseq-train."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from common.attention import record_attention
from recipes.time_series import pictures, side_by_side
from tests.fairseq_plugin.helpers.series import SIZES, build_classifier, configuration, write_waves


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A file as fairseq-train writes it, of a small model with two layers, next to the folder ``data``."""
    return save(tmp_path, "flowformer_time_series")


def save(folder: Path, arch: str) -> Path:
    described = write_waves(folder / "data")
    model = build_classifier(arch, encoder_layers=2)
    state = {name.replace(".toy.", ".main."): value for name, value in model.state_dict().items()}
    config = configuration(arch, **{**SIZES, "encoder_layers": 2})
    task = {
        "_name": "time_series_classification",
        "data": "data",
        "max_length": None,
        "classification_head_name": "main",
    }
    stored = {
        "cfg": {"model": OmegaConf.to_container(config, enum_to_str=True), "task": task, "common": {}},
        "args": None,
        "model": state,
        "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {"description": described.as_dict()},
    }
    torch.save(stored, folder / "model.pt")
    return folder / "model.pt"


def test_a_picture_is_drawn(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A picture of the given series has a panel for each layer and kind of weight."""
    target = tmp_path / "new" / "weights.png"
    arguments = ["--checkpoint", str(checkpoint), "--data", str(tmp_path / "data"), "--output", str(target)]
    assert pictures.main([*arguments, "--series", "3"]) == 0
    assert "Ready: " in capsys.readouterr().out
    with Image.open(target) as image:
        colours = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
        assert image.width > 600 and len(colours) > 50


def test_weights_are_shares_and_gates(checkpoint: Path) -> None:
    """Competition has mean 1 over steps; one map per layer, with as many steps as the series."""
    hub = pictures.load(checkpoint)
    weights = pictures.weigh(hub, np.random.default_rng(0).normal(50, 3, (11, 3)), "slow")
    assert len(weights.competition) == len(weights.allocation) == 2
    assert weights.series.shape == (11, 3) and weights.competition[0].shape == weights.allocation[1].shape == (2, 11)
    assert np.allclose(weights.competition[0].mean(1), 1.0, atol=1e-5)
    assert weights.predicted in {"slow", "Fast", "none"}


def test_what_cannot_be_drawn(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """No file, an unknown series, mismatched names: one line on stderr, and no picture."""
    arguments = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "w.png"), "--checkpoint"]
    for command, named in (
        ([*arguments, str(tmp_path / "none.pt")], "none.pt, which is no file"),
        ([*arguments, str(checkpoint), "--series", "24"], "--series is 24; allowed: 0 to 23"),
        ([*arguments, str(checkpoint), "--split", "valid"], "no split valid; allowed: test, train"),
        ([*arguments, str(checkpoint), "--names", "one", "two"], "--names has 2 names; allowed: 1"),
    ):
        assert pictures.main(command) == 1
        assert named in capsys.readouterr().err
    assert not (tmp_path / "w.png").exists()


def test_models_side_by_side(checkpoint: Path, tmp_path: Path) -> None:
    """Flow-Attention's competition, softmax's summed weights; one model without competition is drawn as well."""
    softmax = tmp_path / "softmax"
    softmax.mkdir()
    files = [str(checkpoint), str(save(softmax, "softmax_time_series"))]
    series = np.random.default_rng(0).normal(50, 3, (11, 3))
    names = []
    for file in files:
        hub = pictures.load(Path(file))
        share = side_by_side.weigh(hub, series)
        assert share.weights.shape == (11,) and np.isclose(share.weights.mean(), 1.0)
        names.append(side_by_side.name_of(side_by_side.last_attention(hub)))
        with record_attention(hub, maps=True) as records:
            hub.predict([series])
        expected = records[-1].competition if file == files[0] else records[-1].map.sum(2)
        expected = expected[0].mean(0).numpy()
        assert np.allclose(share.weights, expected / expected.mean(), atol=1e-5)
    assert names == ["flow, competition", "softmax, summed weights"]
    for chosen, target in ((files, "several.png"), (files[1:], "one.png")):
        arguments = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / target), "--series", "3", "4"]
        assert pictures.main([*arguments, "--checkpoint", *chosen]) == 0
        with Image.open(tmp_path / target) as image:
            assert image.width > 600
