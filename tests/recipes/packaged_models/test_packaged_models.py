"""The commands that train the packaged models, on very little data: what they write is what the packages can load."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_plugin import LinearTimeLanguageModel
from fairseq_plugin.data.character_text import CharacterText
from recipes.images import write_digits
from recipes.library import from_line
from recipes.packaged_models import characters, digits

#: Speeches of two lines, each with a number.
SPEECHES = [f"SPEAKER {i % 3}:\nThis is speech number {i}, and it has a second line.\n" for i in range(900)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "plays.txt"
    path.write_text("\n".join(SPEECHES), encoding="utf-8")
    return path


def test_a_speech_is_a_line_of_characters_as_prompts_are_spelled(text: Path) -> None:
    """In order, each in one split, and nothing is lost; fairseq-interactive gives the model the same tokens."""
    splits = characters.read_splits(text)
    assert {split: len(lines) for split, lines in splits.items()} == {"train": 810, "valid": 45, "test": 45}
    lines = [line for split in splits.values() for line in split]
    assert lines[0].startswith("S P E A K E R ▁ 0 : ⏎ T h i s ▁ i s")
    assert [from_line(line.replace(" ", "")) for line in lines] == SPEECHES
    assert all(CharacterText.encode(x.removesuffix("\n")) + "\n" == line for line, x in zip(lines, SPEECHES))


@pytest.mark.usefixtures("imported_already")
def test_characters_are_trained_evaluated_and_written(text: Path, tmp_path: Path, capsys) -> None:
    """A second call trains nothing again; another number of updates needs another folder."""
    arguments = ["--file", str(text), "--out", str(tmp_path / "out"), "--updates", "2"]
    characters.main(arguments)
    assert "Perplexity: " in capsys.readouterr().out.splitlines()[-1]
    hub = LinearTimeLanguageModel.from_pretrained(str(tmp_path / "out" / "model"))
    assert hub.sample("SPEAKER 1:", max_len_b=20).startswith("SPEAKER 1:")
    written = (tmp_path / "out" / "model" / "model.safetensors").stat().st_mtime_ns
    characters.main(arguments)
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match="Choose another --out"):
        characters.main([*arguments[:-1], "3"])
    (tmp_path / "short.txt").write_text("a\n\nb\n")
    with pytest.raises(SystemExit, match="short.txt"):
        characters.main(["--file", str(tmp_path / "short.txt"), "--out", str(tmp_path / "new")])


@pytest.mark.usefixtures("imported_already")
def test_digits_are_trained_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The accuracy is that of the written weights, which are in half precision."""
    monkeypatch.setattr(digits, "write_digits", partial(write_digits, held_out=1700))
    arguments = ["--out", str(tmp_path / "out"), "--seeds", "1", "--epochs", "1"]
    digits.main(arguments)
    said = capsys.readouterr().out.splitlines()[-1]
    path = tmp_path / "out" / "flowformer_hier_digits-1.safetensors"
    weights = load_file(path)
    assert {x.dtype for x in weights.values() if x.is_floating_point()} == {torch.float16}
    before = path.stat().st_mtime_ns
    digits.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1] == said and "seed 1" in said
    assert path.stat().st_mtime_ns == before
