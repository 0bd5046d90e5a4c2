"""DAFT's Table 3 and Figure 2 in small: what a model starts from, once from images to the table, and wrong sizes."""

import json

import pytest
import torch

from recipes.papers import larger_images
from tests.recipes.small_images import write_few

SIZES = "--seeds 1 --epochs 3 --width 16 --layers 1 --heads 2 --side 8 --patch 4 --larger 16 --sides 12".split()
SIZES += ["--windows", "1"]


def test_from_images_to_the_table_and_the_picture(tmp_path, monkeypatch, capsys):
    """Models are also evaluated at the sides of their trainings. A second time nothing is trained."""
    arguments = ["--out", str(tmp_path / "out"), "--data-dir", str(write_few(tmp_path / "few")), *SIZES]
    assert larger_images.main(arguments) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    trained = {one["model"]: one["trained"] for one in content["results"]}
    assert list(trained) == content["plan"]["models"] and len(trained) == 8
    assert {name for name, side in trained.items() if side == 16} == {
        larger_images.DEIT_LARGER,
        larger_images.FINE_TUNED,
        larger_images.RANDOM,
    }
    assert all(set(one["top1"]) == {"8", "12", "16"} for one in content["results"])
    assert set(content["measured"]["cells"]) == {"Deit base", "DAFT-conv ft", "DAFT-conv rand"}
    assert (tmp_path / "out" / "results.png").stat().st_size > 1000
    monkeypatch.setattr(larger_images, "train_model", None)
    assert larger_images.main(arguments) == 0


def test_models_start_from_the_weights_that_they_should(tmp_path, monkeypatch):
    """Nothing is trained: the larger softmax model is the small one, and DAFT-conv has its values and not its keys."""
    started = {}

    def keep(model, images, epochs, size, title):
        started[title.partition(", seed")[0]] = model.state_dict(), epochs
        return {"parameters": 1, "seconds": 0.0, "top1": 0.0}

    monkeypatch.setattr(larger_images, "train_model", keep)
    assert (
        larger_images.main(["--out", str(tmp_path / "out"), "--data-dir", str(write_few(tmp_path / "few")), *SIZES])
        == 0
    )
    name, width = "blocks.0.attn.qkv.weight", 16
    (small, epochs), (larger, later), (tuned, _), (random, _) = (
        started[name]
        for name in (larger_images.DEIT, larger_images.DEIT_LARGER, larger_images.FINE_TUNED, larger_images.RANDOM)
    )
    assert torch.equal(small[name], larger[name]) and (epochs, later) == (3, 1)
    assert (small["pos_embed"].shape[1], larger["pos_embed"].shape[1]) == (5, 17)
    assert torch.equal(tuned[name][-width:], larger[name][-width:])
    assert not torch.equal(tuned[name][:width], larger[name][:width])
    assert not torch.equal(random[name][-width:], larger[name][-width:])
    assert torch.equal(tuned["head.weight"], larger["head.weight"]) and "pos_embed" not in tuned


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--sides", "28", "30"], "--sides is 30"),
        (["--larger", "50"], "--larger"),
        (["--windows", "4"], "--windows has 4"),
        (["--patch", "5"], "--side is 28"),
        (["--heads", "7"], "--heads is 7"),
    ],
)
def test_sizes_that_cannot_be_are_refused(option, said, tmp_path, capsys):
    assert larger_images.main(["--out", str(tmp_path / "out"), *option]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
