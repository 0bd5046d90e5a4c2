"""The commands that train the packaged models, on very little data: what they write is what the packages can load."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_plugin import LinearTimeLanguageModel
from fairseq_plugin.data.character_text import CharacterText
from recipes.packaged_models import characters, digits
from recipes.shared.corpus import from_line
from recipes.shared.digits import write_digits

#: Speeches of two lines, each with a number.
SPEECHES = [f"SPEAKER {i % 3}:\nThis is speech number {i}, and it has a second line.\n" for i in range(900)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "plays.txt"
    path.write_text("\n".join(SPEECHES), encoding="utf-8")
    return path


def test_a_speech_is_a_line_of_characters(text: Path) -> None:
    """In order, each in one split, and nothing is lost."""
    splits = characters.read_splits(text)
    assert {split: len(lines) for split, lines in splits.items()} == {"train": 810, "valid": 45, "test": 45}
    lines = [line for split in splits.values() for line in split]
    assert lines[0].startswith("S P E A K E R ▁ 0 : ⏎ T h i s ▁ i s")
    assert [from_line(line.replace(" ", "")) for line in lines] == SPEECHES


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"\xff\xfe", "UTF-8"), (b"a\n\nb\n", "2 paragraphs"), ("a⏎b\n\n".encode() * 40, "⏎")],
    ids=["not UTF-8", "too short", "a mark"],
)
def test_a_text_that_cannot_be_used_is_one_line(content: bytes, word: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    arguments = ["--file", str(tmp_path / "text.txt"), "--out", str(tmp_path / "new")]
    assert characters.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line and "text.txt" in line and "allowed" in line


def test_characters_are_trained_evaluated_and_written(text: Path, tmp_path: Path, imported_already, capsys) -> None:
    """With a second call, nothing is trained again, and another number of updates or another text is refused."""
    arguments = ["--file", str(text), "--out", str(tmp_path / "out"), "--updates", "2"]
    assert characters.main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    tokens = sum(len(line.split()) + 1 for line in characters.read_splits(text)["test"])
    assert f"of {tokens:,} test characters" in last
    hub = LinearTimeLanguageModel.from_pretrained(str(tmp_path / "out" / "model"))
    assert hub.sample("SPEAKER 1:", max_len_b=20).startswith("SPEAKER 1:")
    assert characters.main([*arguments[:-1], "3"]) == 1
    assert "updates" in capsys.readouterr().err
    (tmp_path / text.name).write_text(text.read_text(encoding="utf-8").replace("speech", "sermon"), encoding="utf-8")
    assert characters.main(["--file", str(tmp_path / text.name), *arguments[2:]]) == 1
    assert "text_sha256 is " in capsys.readouterr().err


def test_digits_are_trained_and_written(tmp_path: Path, imported_already, monkeypatch, capsys) -> None:
    """The accuracy is that of the written weights, which are in half precision."""
    monkeypatch.setattr(digits, "write_digits", partial(write_digits, validation=1700))
    out = tmp_path / "out"
    assert digits.main(["--out", str(out), "--seeds", "1", "--epochs", "1"]) == 0
    assert "seed 1" in capsys.readouterr().out.splitlines()[-1]
    weights = load_file(out / "flowformer_hier_digits-1.safetensors")
    assert {x.dtype for x in weights.values() if x.is_floating_point()} == {torch.float16}
    before = (out / "seed-1" / "last.pth.tar").stat().st_mtime_ns
    assert digits.main(["--out", str(out), "--seeds", "1", "--epochs", "1"]) == 0
    assert (out / "seed-1" / "last.pth.tar").stat().st_mtime_ns == before


def test_prompts_are_spelled_as_the_text_is(text: Path) -> None:
    """fairseq-interactive gives the model the tokens that it was trained on."""
    lines = [line for split in characters.read_splits(text).values() for line in split]
    for line, speech in zip(lines, SPEECHES, strict=True):
        assert CharacterText.encode(speech.removesuffix("\n")) + "\n" == line
        assert CharacterText.decode(line.removesuffix("\n")) + "\n" == speech
