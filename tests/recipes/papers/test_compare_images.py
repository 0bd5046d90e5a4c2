"""The rows of a table of image models in small: what is built and trained, and once from the digits to the table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.demo import train_digits
from recipes.papers import compare_images, images
from recipes.papers.building import count_parameters
from recipes.papers.images import ImageRows, models_of, small_model, typed
from recipes.papers.small import IMAGE_TABLES
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data


def options_of(paper: str, table: str) -> ImageRows:
    """Nine epochs, two seeds."""
    return compare_images.EXPERIMENT.parse([paper, table, "--epochs", "9", "--seeds", "2"])


SIZE = options_of("daft", "2")


@pytest.mark.parametrize(("paper", "table"), IMAGE_TABLES)
def test_every_row_is_built_and_trained_in_one_size(paper, table):
    """timm builds each; only the row of fewer epochs has fewer, and none but it shares its model with another."""
    models = models_of(paper, table)
    planned = compare_images.EXPERIMENT.planned(options_of(paper, table), Data(Path("digits"), {}))
    assert len({one.training.name for one in planned}) == 2 * len(models) and len(models) >= 2
    seen = {}
    for one in planned[: len(models)]:
        options = train_digits.parser().parse_args([str(word) for word in one.training.arguments])
        width = options.model_kwargs.get("embed_dim") or options.model_kwargs["embed_dims"][-1]
        assert width == 48 and options.img_size == 32 and options.seed == 1
        assert options.epochs == (6 if one.model.endswith("Epochs 200") else 9)
        seen.setdefault((options.model, *sorted(map(str, options.model_kwargs.items()))), []).append(one.model)
        row = models[one.model].training
        shown = f"{options.model} --model-kwargs {' '.join(typed(options.model_kwargs))}"
        assert 10_000 < count_parameters(replace(row, model=shown)) < 300_000
    shared = [names for names in seen.values() if len(names) > 1]
    assert all(any(name.endswith("Epochs 200") for name in names) for names in shared)


def test_heads_windows_and_biases_shrink_with_the_model():
    assert (
        small_model("daft_conv_s", SIZE)[1]["num_heads"] == 48
        and small_model("daft_conv_s_h16", SIZE)[1]["num_heads"] == 4
    )
    assert [small_model(f"daft_conv_s --model-kwargs window={w}", SIZE)[1]["window"] for w in (7, 11, 15)] == [5, 7, 9]
    assert small_model("daft_conv_s", SIZE)[1]["window"] == 7
    assert small_model("daft_full_s", SIZE)[1]["bias_dim"] == 16
    assert small_model("daft_full_s --model-kwargs bias_dim=0", SIZE)[1]["bias_dim"] == 0
    assert small_model("daft_conv_s --model-kwargs query=False", SIZE)[1]["query"] is False
    assert small_model("mixer_deit_s", SIZE)[1]["num_blocks"] == 2


def test_rows_come_in_the_published_order():
    assert list(models_of("daft", "8")) == ["with q (default), 15", "with q (default), 11", "w/o q, 15", "w/o q, 11"]
    assert list(models_of("daft", "2"))[0] == "DAFT-conv, Heads 384, Epochs 300"
    assert models_of("daft", "8")["w/o q, 15"].published == "79.5"


def test_what_is_not_run_and_not_there_is_said(tmp_path, capsys):
    def notes_of(paper: str, table: str) -> list[str]:
        options, nothing = options_of(paper, table), Results([], {})
        facts = compare_images.measured(options, Data(tmp_path, {}), nothing)
        return compare_images.EXPERIMENT.report(options, facts, nothing).tables[0].notes

    assert any(note.startswith("not run: ResNet50: a convolutional network") for note in notes_of("daft", "2"))
    notes = notes_of("flowformer", "5")
    assert any("two stages, of width 24 and 48" in note for note in notes)
    assert any("without a teacher" in note for note in notes) and any("ViT-BASE" in note for note in notes)
    for arguments, said in (
        (["daft", "3"], "TABLE is 3; allowed for daft: 2, 6, 7, 8"),
        (["flowformer", "4"], "allowed for flowformer: 5; its rows in small: python -m recipes.papers.compare "),
    ):
        with pytest.raises(SystemExit):
            compare_images.main([*arguments, "--out", str(tmp_path / "out")])
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("imported_already")
def test_from_the_digits_to_the_table(tmp_path, monkeypatch, capsys):
    """One epoch of a tiny size. The second time nothing is trained; another size is refused in the same folder."""
    arguments = [
        "daft",
        "6",
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--width",
        "16",
        "--layers",
        "1",
    ]
    assert compare_images.main(arguments) == 0
    assert "Fewer than three rows" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["model"] for one in content["results"]] == ["Factorized (default)", "Non Factorized"]
    assert all(0 < one["top1"] < 100 and one["parameters"] > 1000 for one in content["results"])
    assert content["measured"][0]["column"] == "Top 1 Acc" and len(content["measured"][0]["cells"]) == 2
    monkeypatch.setattr(images, "TRAINER", ("-c", "raise SystemExit(1)"))
    assert compare_images.main(arguments) == 0
    assert compare_images.main([*arguments, "--width", "32"]) == 1
    assert "width is 32; allowed in" in capsys.readouterr().err
