"""The rows of a table of image models in small: what is built and trained, and once from images to the table."""

import json
from dataclasses import replace

import pytest
import torch

from recipes.papers import compare_images
from recipes.papers.compare_images import ImageRows, epochs_of, models_of
from recipes.papers.images import build, small_model
from recipes.papers.small import IMAGE_TABLES
from recipes.papers.trainings import trainings_of
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data
from recipes.shared.image_training import Images
from tests.recipes.small_images import write_few

#: Facts of ``prepare``.
FACTS = {"images": "MNIST", "counts": {"train": 4000, "validation": 1000}}


def options_of(paper: str, table: str) -> ImageRows:
    """Nine epochs, two seeds."""
    return compare_images.EXPERIMENT.parse([paper, table, "--epochs", "9", "--seeds", "2"])


SIZE = options_of("daft", "2")


@pytest.mark.parametrize(("paper", "table"), IMAGE_TABLES)
def test_every_row_is_built_in_one_size_and_sees_an_image(paper, table):
    """None but the row of fewer epochs shares its model with another."""
    models, seen = models_of(paper, table), {}
    images = {"train": Images(torch.randn(2, 1, 28, 28), torch.tensor([0, 9]))}
    for name, model in models.items():
        architecture, kwargs = small_model(model.training.model, SIZE)
        seen.setdefault((architecture, *sorted(map(str, kwargs.items()))), []).append(name)
        built = build(architecture, kwargs, images, 1).eval()
        assert built(images["train"].pixels).shape == (2, 10)
        assert built.num_features == 48 and 10_000 < sum(x.numel() for x in built.parameters()) < 300_000
        assert epochs_of(model.training, 9) == (6 if name.endswith("Epochs 200") else 9)
    shared = [names for names in seen.values() if len(names) > 1]
    assert len(models) >= 2 and all(any(name.endswith("Epochs 200") for name in names) for names in shared)


def test_heads_windows_and_biases_shrink_with_the_model():
    assert [small_model(name, SIZE)[1]["num_heads"] for name in ("daft_conv_s", "daft_conv_s_h16")] == [48, 8]
    assert [small_model(f"daft_conv_s --model-kwargs window={w}", SIZE)[1]["window"] for w in (7, 11, 15)] == [3, 3, 5]
    assert small_model("daft_conv_s", replace(SIZE, patch=4))[1]["window"] == 5
    assert small_model("daft_full_s", SIZE)[1]["bias_dim"] == 16
    assert small_model("daft_full_s", replace(SIZE, width=2))[1]["bias_dim"] == 1, "0 would be another model"
    assert small_model("daft_full_s --model-kwargs bias_dim=0", SIZE)[1]["bias_dim"] == 0
    assert small_model("daft_conv_s --model-kwargs query=False", SIZE)[1]["query"] is False
    assert small_model("mixer_deit_s", SIZE)[1]["num_blocks"] == 2
    assert small_model("nystrom_hier_s", SIZE)[1]["landmarks"] == 12, "a quarter of 7 x 7 tokens"


def test_rows_come_in_the_published_order():
    assert list(models_of("daft", "8")) == ["with q (default), 15", "with q (default), 11", "w/o q, 15", "w/o q, 11"]
    assert list(models_of("daft", "2"))[0] == "DAFT-conv, Heads 384, Epochs 300"
    assert models_of("daft", "8")["w/o q, 15"].published == "79.5"


def test_a_row_without_a_model_for_each_column_is_refused(monkeypatch):
    monkeypatch.setattr(compare_images, "trainings_of", lambda entry: trainings_of(entry)[:1])
    with pytest.raises(ValueError, match="shorter"):
        models_of("daft", "8")


def test_a_row_with_two_models_has_two_numbers(tmp_path):
    """The first one has its place in the order."""
    options = options_of("flowformer", "5")
    rows = [model.row for model in options.models_by_name.values()]
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    records = [
        {"model": name, "seed": 1, "top1": 50.0 - places[row] if rows.index(row) == i else 99.0}
        for i, (name, row) in enumerate(zip(options.models_by_name, rows))
    ]
    facts = compare_images.measured(options, Data(tmp_path, FACTS), Results(records, {}))
    (kept,) = facts["measured"]
    assert [cell for cell in kept["cells"].values() if "/" in cell] == ["49.00 / 99.00", "48.00 / 99.00"]
    assert "none in the second" in kept["what"] and facts["order"].endswith(": 0.99.")


def test_what_is_not_run_and_not_there_is_said(tmp_path, capsys):
    def notes_of(paper: str, table: str) -> list[str]:
        options, nothing = options_of(paper, table), Results([], {})
        facts = compare_images.measured(options, Data(tmp_path, FACTS), nothing)
        return compare_images.EXPERIMENT.report(options, facts, nothing).tables[0].notes

    notes = notes_of("daft", "2")
    assert "9 epochs (6 for DAFT-conv, Heads 384, Epochs 200); accuracy on 1,000 that are held out, 0 seeds" in notes[0]
    assert any(note.startswith("not run: ResNet50: a convolutional network") for note in notes)
    assert any("MNIST, 4,000 images of 28 x 28 pixels" in note for note in notes) and "10 held-out images" in notes[-1]
    notes = notes_of("flowformer", "5")
    assert any("two stages, of width 24 and 48" in note for note in notes)
    assert any("without a teacher" in note for note in notes) and any("ViT-BASE" in note for note in notes)
    for arguments, said in (
        (["daft", "3"], "allowed for daft: 2, 6, 7, 8; its rows in small: python -m recipes.papers.larger_images"),
        (["flowformer", "4"], "allowed for flowformer: 5; its rows in small: python -m recipes.papers.compare "),
    ):
        with pytest.raises(SystemExit):
            compare_images.main([*arguments, "--out", str(tmp_path / "out")])
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "sizes", "said"),
    [
        ("daft 2", "--patch 5", "--side is 28; allowed: whole patches of --patch 5"),
        ("daft 2", "--patch 56", "--side is 28"),
        ("daft 2", "--heads 7", "--heads is 7; allowed: a divisor of --width 48"),
        ("flowformer 5", "--stage-patch 8", "--side is 28; allowed: whole patches of --stage-patch 8"),
        ("flowformer 5", "--patch 5", "whole patches of --patch 5"),
        ("flowformer 5", "--layers 1", "--layers is 1; allowed: at least 2"),
        ("flowformer 5", "--width 1 --heads 1", "--width is 1; allowed: at least 2"),
        ("flowformer 5", "--width 20 --heads 10 --stage-patch 7", None),
        ("flowformer 5", "--width 15 --heads 5", "--heads is 5; allowed: a divisor of --width 15"),
        ("daft 6", "--stage-patch 8 --layers 1", None),
    ],
)
def test_sizes_that_no_model_can_have_are_refused_before_anything_is_made(table, sizes, said, tmp_path, capsys):
    """Options of hierarchical models count only where a row is one."""
    arguments = [*table.split(), *sizes.split(), "--out", str(tmp_path / "out")]
    if said is None:
        assert compare_images.EXPERIMENT.parse(arguments).models
    else:
        assert compare_images.main(arguments) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_from_images_to_the_table(tmp_path, monkeypatch, capsys):
    """One epoch of a tiny size. The second time nothing is trained; another size or other images are refused there."""
    sizes = "--seeds 1 --epochs 1 --width 16 --layers 1 --side 8 --patch 4".split()
    arguments = ["daft", "6", "--out", str(tmp_path / "out"), "--data-dir", str(write_few(tmp_path / "few")), *sizes]
    assert compare_images.main(arguments) == 0
    said = capsys.readouterr().out
    assert "Fewer than three rows" in said and "1 of 2" in said and "remain" in said
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["model"] for one in content["results"]] == ["Factorized (default)", "Non Factorized"]
    assert all(0 <= one["top1"] <= 100 and one["parameters"] > 1000 for one in content["results"])
    assert content["measured"][0]["column"] == "Top 1 Acc" and len(content["measured"][0]["cells"]) == 2
    monkeypatch.setattr(compare_images, "train_model", None)
    assert compare_images.main(arguments) == 0
    assert compare_images.main([*arguments, "--width", "32"]) == 1
    assert "width is 32; allowed in" in capsys.readouterr().err
    assert compare_images.main([*arguments, "--data-dir", str(write_few(tmp_path / "other" / "few", 9))]) == 1
    assert "images is few, sha256 " in capsys.readouterr().err
