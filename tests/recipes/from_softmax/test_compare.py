"""Language models: the whole comparison once, the needles in its text, and what its options refuse."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from common.attention import build_attention
from recipes.from_softmax import compare, forms, images, measure, needles
from recipes.positions import read_stream

SIZES = "--width 8 --heads 2 --layers 2 --tokens-per-sample 16 --batch-tokens 64 --window 4 --needles 2 --seeds 1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, imported_already) -> tuple[Path, list[str]]:
    """The folder of a complete comparison of a form with a window and one built for a length, and its arguments."""
    folder = tmp_path_factory.mktemp("text")
    text, out = folder / "text.txt", folder / "out"
    text.write_text("#\n" + "".join(f"line {i} of a small text\n" for i in range(200)), encoding="utf-8")
    arguments = ["--quick", "--file", str(text), "--out", str(out), "--models", "lolcats,softmax", "cosformer"]
    compare.main(arguments + SIZES.split())
    return out, arguments + SIZES.split()


def words(out: Path, training: str) -> list[str]:
    """The arguments of a training."""
    return (out / "runs" / training / "command.txt").read_text().replace(str(out), "OUT").split()


def last(words: list[str], option: str) -> str:
    """The value of an option that counts."""
    return words[len(words) - words[::-1].index(option)]


def test_from_a_text_to_the_results(whole, monkeypatch):
    """Losses after each stage, of parts, and how far back is read; nothing runs again; other options are refused."""
    out, arguments = whole
    windowed, cosine = json.loads((out / "results.json").read_text())
    assert (windowed["model"], cosine["model"]) == ("lolcats,softmax", "cosformer")
    for row in (windowed, cosine):
        assert all(0 < row[stage] < 10 for stage in ("teacher", "exchanged", "after stage 1", "after stage 2"))
        assert row["exchanged"] != row["after stage 2"] != row["after stage 1"] and row["from scratch"] > 0
    # In one layer of two: maps of queries and keys of 2 rows and 4 channels, and a gate, of 2 heads; all projections.
    assert windowed["learned"] == 2 * (2 * 2 * 4 + 1) and cosine["learned"] == 2 * 3 * (8 * 8 + 8)
    assert windowed["whole"] == pytest.approx(windowed["after stage 2"])
    assert len({windowed[part] for part in forms.PARTS}) == 4 and cosine["whole"] is None
    rows = [row.split("|") for row in (out / "results.md").read_text().splitlines() if row.startswith("|")]
    found = {row[1].strip(): [x.strip() for x in row] for row in rows}
    gap, won = cosine["exchanged"] - cosine["teacher"], cosine["exchanged"] - cosine["after stage 2"]
    assert found["cosformer"][8] == (f"{100 * won / gap:.1f}" if gap > 0 else "-")
    assert "%" in found["lolcats,softmax, trained"][-2] and found["cosformer, trained"][-2] == "-"  # by position
    assert (out / "results.png").exists()
    logs = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.log")}
    monkeypatch.setattr(compare, "measured", None)
    compare.main(arguments)
    assert len(logs) == 7 and {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.log")} == logs
    with pytest.raises(SystemExit, match="window=4"):
        compare.main([*arguments, "--window", "8"])


def test_a_stage_goes_on_from_the_one_before_with_its_own_budget(whole):
    out, _ = whole
    teacher, first, second, scratch = (
        words(out, f"{name}.1")
        for name in ("teacher", *(f"lolcats-softmax.{x}" for x in ("transfer", "distillation", "scratch")))
    )
    assert [last(x, "--max-update") for x in (teacher, first, second, scratch)] == ["20", "2", "2", "4"]
    assert [last(x, "--lr") for x in (teacher, first, second, scratch)] == ["0.003", "0.01", "0.001", "0.003"]
    assert [last(x, "--arch") for x in (teacher, scratch)] == ["transformer_lm", "hybrid_lm"]
    assert "--decoder-normalize-before" in teacher
    for x in (first, second, scratch):
        assert last(x, "--lineartime-layers") == "lolcats,softmax" and last(x, "--lolcats-window") == "4"
    for x in (first, second):
        assert last(x, "--teacher") == "OUT/runs/teacher.1/checkpoints/checkpoint_last.pt"
    starts = [last(x, "--finetune-from-model") for x in (first, second)]
    assert starts == [f"OUT/runs/lolcats-softmax.{x}" for x in ("exchanged.1.pt", f"transfer.1/{compare.LAST}")]
    assert last(first, "--transfer-window-dropout") == "0.5" and last(second, "--distillation-weight") == "0.5"
    assert last(first, "--lineartime-trained-parameters") == "new"
    assert last(words(out, "cosformer.transfer.1"), "--lineartime-trained-parameters") == "attention"
    assert "--teacher" not in scratch and "--criterion" not in scratch


def test_sequences_have_copies_of_one_needle_in_the_text(whole):
    """The marker is the rarest symbol; without the needles, the sequences are the text."""
    out, _ = whole
    text = read_stream(out / "data-bin", "train").numpy()[1:]
    mixed = read_stream(out / "needles-bin", "train").numpy()[1:].reshape(-1, 16)
    dictionary = Dictionary.load(str(out / "needles-bin" / "dict.txt"))
    counts = {dictionary.count[i] for i in range(dictionary.nspecial, len(dictionary)) if dictionary.count[i]}
    symbols = needles.symbols_of(out / "data-bin")
    marker, others = symbols[0], symbols[1:]
    assert dictionary.count[marker] == min(counts) and len(others) == 8
    room = 16 - 2 * needles.SIZE
    assert len(mixed) == len(text) // room
    for i, sequence in enumerate(mixed.tolist()):
        assert sequence.count(marker) >= 2 and set(others) & set(sequence)
        assert any(
            list(text[i * room : (i + 1) * room]) == np.delete(sequence, [a, a + 1, b, b + 1]).tolist()
            for a in range(16)
            for b in range(a + 2, 15)
            if sequence[a : a + 2] == sequence[b : b + 2] and sequence[a] == marker
        )


class Finder(nn.Module):
    """Writes what followed the last marker that it sees among ``window`` tokens, else the marker."""

    def __init__(self, marker: int, window: int, symbols: int) -> None:
        super().__init__()
        self.marker, self.window, self.symbols = marker, window, symbols

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        scores = torch.zeros(*tokens.shape, self.symbols)
        for row, sequence in enumerate(tokens.tolist()):
            seen = range(max(0, len(sequence) - self.window), len(sequence) - 1)
            found = [sequence[i + 1] for i in seen if sequence[i] == self.marker]
            scores[row, -1, found[-1] if found else self.marker] = 1.0
        return (scores,)


@pytest.mark.parametrize("window", [16, 9, 1])
def test_needles_within_a_window_are_found(window, whole):
    data = whole[0] / "data-bin"
    model = Finder(needles.symbols_of(data)[0], window, len(Dictionary.load(str(data / "dict.txt"))))
    found = measure.needles_found(model, data, 16)
    assert list(found) == [2, 4, 6, 8, 10, 12, 14, 15]
    assert found == {distance: 100.0 if distance < window else 0.0 for distance in found}


def test_attentions_that_learn_maps_are_those_with_parameters():
    options = compare.parsed(["--file", "text.txt", "--models", *forms.PLAIN, "--sinks", "2"])
    for name, form in options.forms.items():
        module = build_attention(form.kinds[0], causal=True, num_heads=2, head_dim=4, max_tokens=16)
        assert (form.learning == "new") == bool(list(module.parameters())), name
    assert options.forms["longformer"].options == {"longformer": {"window": 16, "global_tokens": 2}}
    assert options.forms["lolcats_relu"].arguments()[:4] == [
        *("--lineartime-layers", "lolcats", "--lolcats-feature-map", "relu")
    ]


WRONG = (
    *("--models flo", "--models softmax", "--models flow*0", "--models lolcats,lolcats_relu", "--layers 2"),
    *("--window-weight 1", "--share 0", "--updates 4", "--epochs 4"),
    *("--window-dropout -0.1", "--needles 1", "--needles 200"),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_before_anything_is_trained(wrong, tmp_path, capsys):
    option, value = wrong.split()
    for command, needed in ((compare, ["--file", "text.txt"]), (images, [])):
        with pytest.raises(SystemExit):
            command.main(["--help"])
        if option in capsys.readouterr().out:
            with pytest.raises(SystemExit) as stopped:
                command.main([*needed, "--out", str(tmp_path / "out"), *wrong.split()])
            said = capsys.readouterr().err + str(stopped.value)
            assert "allowed" in said and re.search(f"{option[2:]}|of {value} is", said.replace("_", "-"))
    assert not (tmp_path / "out").exists()
