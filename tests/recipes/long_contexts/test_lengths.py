"""Perplexity by position: windows, bins, models that read longer inputs, and once from a text to the results."""

import json
import math

import pytest
import torch
from fairseq import options as fairseq_options

from common.attention import ATTENTIONS
from recipes import runs
from recipes.long_contexts import lengths
from recipes.positions import edges, perplexities, windows

SIZES = "--width 8 --layers 1 --heads 2 --batch-tokens 64".split()


def test_bins_double_on_both_sides_of_the_training_length():
    assert edges(256, 2048) == [0, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert edges(24, 72) == [0, 1, 3, 6, 12, 24, 48, 72]


def test_every_bin_is_of_the_same_text():
    """Windows begin in steps, so each piece of the text stands at every distance from the beginning of a window."""
    stream = torch.arange(1 + 12 * 4)
    found = windows(stream, 4, 16, most=100)
    assert found.shape == (9, 17) and found[2].tolist() == list(range(8, 25))
    assert len(windows(stream, 4, 16, most=5)) == 5
    with pytest.raises(ValueError, match="at least 29"):
        windows(stream[:28], 4, 16, most=100)


def test_bins_are_means_over_that_text():
    found = windows(torch.arange(200), 8, 32, most=100)
    parts = perplexities(found[:, 1:].double() + torch.arange(32), 8)  # loss of the text, and of the position
    assert list(parts) == ["0 to 1", "1 to 2", "2 to 4", "4 to 8", "8 to 16", "16 to 32"]
    text = float(torch.arange(1 + 24, 1 + 8 * len(found)).double().mean())
    assert math.log(parts["8 to 16"]) == pytest.approx(text + 11.5)
    assert math.log(parts["16 to 32"]) == pytest.approx(text + 23.5)


@pytest.fixture
def text(tmp_path):
    """Lines with something to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"to be or not to be, {i}\n" for i in range(400)), encoding="utf-8")
    return path


def test_every_causal_mechanism_is_trained_with_the_longer_limit(text, tmp_path, imported_already, monkeypatch):
    planned = []
    monkeypatch.setattr(runs, "train_all", lambda plan, *_: planned.extend(plan) or exit())
    with pytest.raises(SystemExit):
        lengths.main(["--file", str(text), *SIZES, "--tokens-per-sample", "16", "--out", str(tmp_path / "out")])
    causal = {name for name, attention in ATTENTIONS.items() if "causal" in attention.supports}
    assert causal | {"flash", "linear+forget", "flow+forget", "flow+short_conv"} <= {one.model for one in planned}
    for one in planned:
        words = [str(word) for word in one.command[2:]]
        parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
        assert (parsed.max_target_positions, parsed.tokens_per_sample) == (128, 16)
        assert getattr(parsed, "no_token_positional_embeddings", False) == one.model.endswith("+no_positions")
        flash = one.model.startswith("flash")
        assert (parsed.decoder_layers, parsed.decoder_ffn_embed_dim) == ((2, 16) if flash else (1, 32))
        assert parsed.arch.startswith("flash") == flash


def test_from_a_text_to_the_results_and_from_another_comparison(text, tmp_path, imported_already, capsys):
    """Two short trainings; then the same models again, with longer windows, which one of them cannot read."""
    out = tmp_path / "out"
    words = ["--file", str(text), "--quick", "--out", str(out), *SIZES, "--tokens-per-sample", "32"]
    lengths.main([*words, "--models", "linear", "daft_full"])
    results = json.loads((out / "results.json").read_text())
    assert {one["model"]: len(one["perplexities"]) for one in results} == {"linear": 6, "daft_full": 6}
    assert all(1 < value < 1000 for one in results for value in one["perplexities"].values())
    assert (out / "results.png").exists()
    longer = ["--runs", str(out), "--tokens-per-sample", "32", "--times", "4", "--out", str(tmp_path / "longer")]
    lengths.main(longer)
    shown = capsys.readouterr().out
    results = {one["model"]: one for one in json.loads((tmp_path / "longer" / "results.json").read_text())}
    assert len(results["linear"]["perplexities"]) == 7 and results["daft_full"]["perplexities"] == {}
    assert "daft_full.1 cannot read longer inputs: " in shown and "allowed: 64" in results["daft_full"]["refused"]
    rows = [line.split("|")[1].strip() for line in shown.split("sequences of 32")[-1].splitlines() if line[:1] == "|"]
    assert rows[2:] == ["linear", "daft_full"]  # the best at the last positions first
    for change in ([*longer, "--file", str(text)], ["--out", str(tmp_path / "none")], [*longer, "--times", "1"]):
        with pytest.raises(SystemExit):
            lengths.main(change)
    assert not (tmp_path / "none").exists()
