"""The whole comparison from sentences to the table; checkpoints of a transfer; what CTC reads in frames."""

import json
from pathlib import Path

import pytest
import torch

from recipes.speech import compare, espeak, trainings
from recipes.speech.recognise import collapsed, recognise
from recipes.speech.trainings import BEST, LAST, STAGES, Speech
from recipes.speech.transfer import learns_maps, write_converted, write_joined, write_teacher
from tests.compare import weights

ARGUMENTS = (
    "--quick --seeds 1 --models wav2vec2 hedgehog --transfer hedgehog --sentences 20 --seconds 1 --lengths 1 2 "
    "--train 4 --test-seconds 2 --width 16 --layers 1 --batch-seconds 4 --updates 2"
).split()
LENGTHS = [1, 2]


@pytest.fixture
def compared(spoken, tmp_path, imported_already) -> Path:
    """The folder of a whole comparison of two tiny models."""
    assert compare.main([*ARGUMENTS, "--out", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_from_sentences_to_the_table(compared: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A second call runs nothing; another learning rate in the same folder is refused.

    It costs seconds: five trainings, from pretraining to the transfer, which all other tests here need.
    """
    stock, hedgehog, transfer = json.loads((compared / "results.json").read_text())["results"]
    assert (stock["model"], hedgehog["model"]) == ("wav2vec2", "hedgehog")
    for record in (stock, hedgehog):
        assert [x["length"] for x in record["read"]] == LENGTHS
        assert all(x["milliseconds"] > 0 and x["peak_bytes"] > 0 and x["cer"] >= 0 for x in record["read"])
    assert hedgehog["parameters"] > stock["parameters"] and transfer["cer"].keys() == STAGES.keys()
    assert (compared / "results.png").exists()
    _other_attentions_take_their_places(compared)
    logs = {path: path.stat().st_mtime_ns for path in compared.rglob("*.log")}
    assert len(logs) == 5
    monkeypatch.setattr(espeak, "speak", None)
    monkeypatch.setattr(trainings, "recognise", None)
    arguments = [*ARGUMENTS, "--out", str(compared)]
    assert compare.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in compared.rglob("*.log")} == logs
    assert compare.main([*arguments, "--lr", "0.5"]) == 1
    assert "lr is 0.5; allowed in" in capsys.readouterr().err


def _other_attentions_take_their_places(out: Path) -> None:
    """Our softmax attention in the trained model reads what the model reads; all weights but maps are its own."""
    runs = out / "runs"
    start, tuned, teacher = runs / "start.1" / LAST, runs / "wav2vec2.1" / BEST, runs / "teacher.1.pt"
    checked = out.parent / "checked"
    checked.mkdir()
    write_teacher(start, tuned, checked / "teacher.pt")
    write_converted(checked / "teacher.pt", checked / "softmax.pt", "softmax_wav2vec2", {})
    write_joined(tuned, teacher, checked / "softmax.pt", checked / "joined.pt")
    one, other = (recognise(path, out / "data", LENGTHS, False) for path in (tuned, checked / "joined.pt"))
    assert [x.cer for x in one] == [x.cer for x in other]
    trained, joined = (
        weights(torch.load(path, weights_only=False)["model"]) for path in (tuned, checked / "joined.pt")
    )
    assert trained.keys() == joined.keys() and all(torch.equal(x, joined[name]) for name, x in trained.items())
    assert learns_maps(runs / "hedgehog.exchanged.1.pt") and not learns_maps(checked / "softmax.pt")
    untrained = weights(torch.load(runs / "hedgehog.untrained.1.pt", weights_only=False)["model"])
    maps = untrained.keys() - trained.keys()
    assert maps and all(".inner." in name for name in maps)
    assert all(torch.equal(x, untrained[name]) for name, x in trained.items())
    transferred = weights(torch.load(runs / "hedgehog.joined.1.pt", weights_only=False)["model"])
    assert {name for name, x in untrained.items() if not torch.equal(x, transferred[name])} == maps


def test_symbols_of_frames_become_a_text() -> None:
    """Repetitions are one symbol unless a blank stands between them."""
    frames = torch.tensor([0, 0, 5, 5, 0, 5, 6, 6, 0, 0])
    assert collapsed(frames, blank=0).tolist() == [5, 5, 6]
    assert collapsed(torch.zeros(4, dtype=torch.long), blank=0).tolist() == []


def test_an_attention_with_a_constant_for_each_frame_gets_the_longest_recording() -> None:
    assert Speech(lengths=(5, 600)).overrides("cosformer") == {"lineartime_max_frames": 30_000}
    assert Speech().overrides("linear") == {}


def test_a_transfer_needs_its_teacher(tmp_path: Path, spoken: list[str], capsys) -> None:
    assert compare.main(["--quick", "--models", "linear", "--out", str(tmp_path / "out")]) == 1
    assert "--models lacks wav2vec2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not spoken
