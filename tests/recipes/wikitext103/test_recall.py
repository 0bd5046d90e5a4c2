"""Recalling a token by its position: accuracy after training, and the written results."""

import json
from pathlib import Path

import pytest
import torch

from recipes.wikitext103 import recall


def test_a_window_finds_the_token_before(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A window of one token cannot, one of two can. Each trains for a second."""
    arguments = ["--models", "local", "--seeds", "1", "--out", str(tmp_path), "--updates", "60", "--width", "16"]
    accuracies = []
    for tokens in ("4", "8"):  # the window is a quarter
        assert recall.main([*arguments, "--layers", "1", "--tokens-per-sample", tokens, "--lr", "0.03"]) == 0
        (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
        accuracies.append(result["accuracy"])
        assert f"| local | {result['accuracy']:.1f} |" in (tmp_path / "results.md").read_text()
    assert accuracies[0] < 15.0 and accuracies[1] > 60.0, accuracies
    assert "The symbol 1 places back" in capsys.readouterr().out


def test_a_window_that_ends_before_the_place_does_not_find_it(tmp_path: Path) -> None:
    """Settings as for the window of two tokens above, with a token two positions back."""
    arguments = ["--models", "local", "--seeds", "1", "--out", str(tmp_path), "--updates", "60", "--width", "16"]
    arguments += ["--layers", "1", "--tokens-per-sample", "8", "--lr", "0.03", "--distance", "2"]
    assert recall.main(arguments) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["accuracy"] < 15.0


def test_nothing_is_dropped_when_a_model_is_tried(tmp_path: Path) -> None:
    """Settings as for the window of two tokens above; with dropout, training accuracy is half."""
    arguments = ["--models", "local", "--seeds", "1", "--out", str(tmp_path), "--updates", "60", "--width", "16"]
    arguments += ["--layers", "1", "--tokens-per-sample", "8", "--lr", "0.03", "--more=--dropout 0.5"]
    assert recall.main(arguments) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["accuracy"] > 80.0


def test_every_seed_begins_with_weights_of_its_own() -> None:
    plan = recall.Recall(models=["local"], width=16, layers=1)
    weight, repeated, other_seed = (recall.build(plan, "local", seed).decoder.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(weight, repeated) and not torch.equal(weight, other_seed)


def test_a_place_that_no_sequence_has(capsys: pytest.CaptureFixture) -> None:
    assert recall.main(["--distance", "32"]) == 1
    assert "--tokens-per-sample is 32; allowed: more than --distance, 32" in capsys.readouterr().err
