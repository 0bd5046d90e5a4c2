"""WikiText-103's data from an archive, and which attention recalls the order of tokens."""

import json
import sys
import zipfile

import pytest

from recipes.wikitext103 import data, recall

TEXT = {
    "train": " \n = Title = \n \n Some words <unk> and\u2028more . \n" * 5,
    "valid": " \n = Other = \n words \n",
    "test": " \n words \n",
}


@pytest.mark.parametrize("inner", ["wikitext-103/", ""])
def test_an_archive_is_read_line_by_line_and_must_be_whole(inner, tmp_path, monkeypatch, imported_already) -> None:
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for split, text in TEXT.items():
            archive.writestr(f"{inner}wiki.{split}.tokens", text)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["data", "--file", str(tmp_path / "mine.zip"), "--out", str(out)])
    with pytest.raises(SystemExit, match=r"'train': 65.*'valid': 7.*'test': 3.*103227021"):
        data.main()
    assert {split: (out / "text" / f"{split}.txt").read_text(encoding="utf-8") for split in TEXT} == TEXT


@pytest.mark.parametrize(("tokens", "distance", "finds"), [(4, 1, False), (8, 1, True), (8, 2, False)])
def test_a_window_finds_the_token_before_if_it_reaches_it(tokens, distance, finds, tmp_path, capsys) -> None:
    """The window is a quarter of a sequence: one token, or two. Each trains for a second."""
    arguments = f"--models local --seeds 1 --updates 60 --width 16 --layers 1 --lr 0.03 --distance {distance}".split()
    recall.main([*arguments, "--out", str(tmp_path), "--tokens-per-sample", str(tokens)])
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert result["accuracy"] > 60.0 if finds else result["accuracy"] < 15.0
    assert f"{result['accuracy']:.1f}" in capsys.readouterr().out
