"""Any text as words, subwords, characters or bytes: what the written data say, and what is refused."""

import json
import random
import sys
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary, indexed_dataset

from recipes import prepare_text

LINES = ["to be, or not ▁\n", "\n", "  that\tis the  question\n", "caf\u00e9\u2028 and more\n", "the end\n"] * 12
#: What a character is, where it is not itself.
MARKS = {"▁": " ", "U+2581": "▁", "U+0009": "\t", "U+2028": "\u2028"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_text", *map(str, arguments), "--workers", "1"])
    prepare_text.main()


def sequences(data_bin: Path, split: str) -> list[list[str]]:
    """The symbols of each sequence that fairseq reads."""
    symbols = Dictionary.load(str(data_bin / "dict.txt"))
    dataset = indexed_dataset.make_dataset(str(data_bin / split), "mmap")
    return [[symbols[token] for token in dataset[i].tolist()] for i in range(len(dataset))]


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_each_line_is_a_sequence(unit, text, tmp_path, monkeypatch, imported_already, capsys) -> None:
    """Of 60 lines 54, 3 and 3; the end of a line is one token."""
    prepare(monkeypatch, unit, "--file", text, "--out", tmp_path / "out")
    found = [line for split in ("train", "valid", "test") for line in sequences(tmp_path / "out" / "data-bin", split)]
    assert len(found) == len(LINES) and all(line[-1] == "</s>" for line in found)
    if unit == "words":
        assert [line[:-1] for line in found[:54]] == [line.split() for line in LINES[:54]]
    else:
        assert ["".join(MARKS.get(x, x) for x in line[:-1]) + "\n" for line in found[:54]] == LINES[:54]
    assert len(sequences(tmp_path / "out" / "data-bin", "valid")) == 3
    said = sum(map(len, found[:54]))
    assert f"'train': {said}" in capsys.readouterr().out


def test_subwords_are_learned_from_train_and_lines_come_back(text, tmp_path, monkeypatch, imported_already) -> None:
    """Blank lines are no documents, and whitespace is one space; the dictionary has all subwords."""
    out = tmp_path / "out"
    prepare(monkeypatch, "subwords", "--file", text, "--out", out, "--vocabulary", 283)
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "sentencepiece.model"))
    found = sequences(out / "data-bin", "train")
    written = [" ".join(line.split()) for line in LINES[:54]]
    kept = [line for line in written if line]
    assert [line[-1] for line in found] == ["</s>"] * len(kept)
    assert [model.decode(line[:-1]) for line in found][1:4] == kept[1:4]
    assert len(Dictionary.load(str(out / "dict.txt"))) == 283
    documents, words, tokens = json.loads((out / "text.json").read_text())["counts"]["train"]
    assert (documents, words) == (54, sum(len(line.split()) for line in written))
    assert tokens == sum(map(len, found))


def test_every_byte_is_a_token(tmp_path, monkeypatch) -> None:
    """Any bytes, cut at 90 and 95 per cent; long lines are several sequences, and the newline is </s>."""
    content = bytes(random.Random(0).choices([*range(256), *[10] * 40], k=1_000)) + b"x" * 70_000 + b"\n\xff end"
    (tmp_path / "any").write_bytes(content)
    prepare(monkeypatch, "bytes", "--file", tmp_path / "any", "--out", tmp_path / "out", "--limit", 71_000)
    found = {split: sequences(tmp_path / "out" / "data-bin", split) for split in ("train", "valid", "test")}
    lengths = {split: sum(map(len, lines)) for split, lines in found.items()}
    assert lengths == {"train": 63_900, "valid": 3_550, "test": 3_550}
    back = b"".join(bytes([10 if x == "</s>" else int(x)]) for lines in found.values() for line in lines for x in line)
    assert back == content[:71_000]
    assert max(map(len, found["train"])) <= 1 << 16
    assert len(Dictionary.load(str(tmp_path / "out" / "data-bin" / "dict.txt"))) == 4 + 255


def test_a_second_run_makes_nothing_and_another_text_is_refused(text, tmp_path, monkeypatch, imported_already) -> None:
    arguments = ["words", "--file", text, "--out", tmp_path / "out"]
    prepare(monkeypatch, *arguments)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    prepare(monkeypatch, *arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times
    for change in (["--limit", 40], ["--file", __file__]):
        with pytest.raises(SystemExit, match="(?i)choose another --out"):
            prepare(monkeypatch, *arguments, *change)


@pytest.mark.parametrize("unit", ["words", "subwords", "bytes"])
@pytest.mark.parametrize("content", [b"too short\n", None, b"\xff\n" * 30])
def test_a_text_that_cannot_be_used(unit, content, tmp_path, monkeypatch, capsys) -> None:
    """Nothing is written, so that the folder takes another text."""
    path, out = tmp_path / "text.txt", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    if unit == "bytes" and content is not None and len(content) >= 20:
        return
    with pytest.raises(SystemExit) as ended:
        prepare(monkeypatch, unit, "--file", path, "--out", out)
    assert str(path) in f"{ended.value} {capsys.readouterr().err}" and not out.exists()


def test_too_many_subwords_are_refused_before_anything_is_written(text, tmp_path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="9000 subwords.*<= "):
        prepare(monkeypatch, "subwords", "--file", text, "--out", tmp_path / "out", "--vocabulary", 9000)
    assert not (tmp_path / "out").exists()
