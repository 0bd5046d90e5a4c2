"""The comparison of stock weights with random ones, once from a text to the tables, with tiny models."""

import json
from pathlib import Path

import pytest

from recipes.pretrained import compare

WORDS = [a + b + c for a in "bdgk" for b in ("ar", "el", "io") for c in ("mon", "tas", "s")]


@pytest.mark.usefixtures("imported_already")
def test_from_a_text_to_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Models start from what the stock model learned, and the second time nothing is trained."""
    lines = [" ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 9)) for i in range(6000)]
    (tmp_path / "any.txt").write_text("".join(line + "\n" for line in lines))
    monkeypatch.setitem(compare.IMAGE_SHAPE, "depth", 1)
    out = tmp_path / "out"
    arguments = ["--file", str(tmp_path / "any.txt"), "--out", str(out), "--quick", "--vocabulary", "280"]
    compare.main(arguments)
    results = json.loads((out / "results.json").read_text())
    records = {record["model"]: record for record in results}
    assert list(records) == [compare.TEXT_SOURCE, *compare.TEXT_NAMES, compare.IMAGE_SOURCE, *compare.IMAGE_NAMES]
    for stock, random in zip(compare.TEXT_NAMES[::2], compare.TEXT_NAMES[1::2]):
        assert records[stock]["before"] < records[random]["before"] - 0.1
    for name in compare.IMAGE_NAMES:
        assert records[name]["after"] != records[name]["before"] and 0.0 < records[name]["top1"] <= 100.0
    assert "stock weights |" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.name != "command.txt"}
    compare.main(arguments)
    assert json.loads((out / "results.json").read_text()) == results
    assert {path: path.stat().st_mtime_ns for path in times if path.is_file()}.items() <= times.items()


def test_the_library_is_the_text_by_default(tmp_path: Path) -> None:
    path = compare.library_text(tmp_path / "library.txt")
    assert 1_200_000 <= path.stat().st_size < 1_300_000 and "import" in path.read_text(encoding="utf-8")
