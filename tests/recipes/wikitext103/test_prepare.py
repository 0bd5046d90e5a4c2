"""prepare.py: every source gives checked text and a data-bin."""

import io

import pytest

from recipes.shared.download import Source
from recipes.shared.sources import HUB, SOURCES
from recipes.shared.split_text import SPLITS, Counts, count, split_path, take_file
from recipes.shared.working_folder import working_folder
from recipes.wikitext103 import prepare
from tests.recipes.archive_files import zipped
from tests.recipes.server import hub_pages, serve, use_hub

TEXT = {
    "train": " \n = Title = \n \n Some words <unk> and\u2028more . \n" * 5,
    "valid": " \n = Other = \n words \n",
    "test": " \n words \n",
}
COUNTS = {"train": Counts(20, 5 * (0 + 3 + 0 + 6 + 4)), "valid": Counts(3, 7), "test": Counts(2, 3)}


def archive(names=SPLITS, prefix="wikitext-103/"):
    """A zip archive laid out as WikiText-103's."""
    return zipped({f"{prefix}wiki.{name}.tokens": TEXT[name].encode() for name in names})


@pytest.fixture
def small(monkeypatch):
    """Accept the small text above as WikiText-103; returns its archive."""
    monkeypatch.setattr(prepare, "EXPECTED", COUNTS)
    return archive()


def assert_text(folder):
    """Assert that ``folder`` holds the text above, byte for byte, and no partial files."""
    for split in SPLITS:
        assert split_path(folder, split).read_bytes() == TEXT[split].encode()
    assert not list(folder.glob("*.part"))


def test_expected_counts_are_the_papers():
    assert {split: counts.tokens for split, counts in prepare.EXPECTED.items()} == {
        "train": 103_227_021,
        "valid": 217_646,
        "test": 245_569,
    }


def test_the_hub_is_the_second_source(small, monkeypatch, tmp_path, capsys):
    """The hub's tables have rows instead of lines, and a split may be in two tables."""
    hub = HUB["wikitext103"]
    rows = {
        split: ["" if not line.strip() else f"{line}\n" for line in TEXT[split].split("\n")[:-1]] for split in SPLITS
    }
    tables = {"train-0": rows["train"][:3], "train-1": rows["train"][3:]}
    tables |= {"validation-0": rows["valid"], "test-0": rows["test"]}
    files = {f"{hub.folder}/{name}.parquet": parquet(texts) for name, texts in tables.items()}
    with serve(hub_pages(hub.dataset, hub.revision, files)) as served:
        use_hub(monkeypatch, served.address)
        monkeypatch.setitem(SOURCES, "wikitext103", Source(f"{served.address}/wikitext-103-v1.zip"))
        prepare.fetch_text(tmp_path)
    assert_text(tmp_path)
    prepare.check(tmp_path)
    assert "wikitext-103-v1.zip: HTTP Error 404" in capsys.readouterr().out


def parquet(texts):
    """The bytes of a Parquet table of texts."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


@pytest.mark.parametrize("prefix", ["wikitext-103/", ""])
def test_local_zip(tmp_path, prefix):
    (tmp_path / "mine.zip").write_bytes(archive(prefix=prefix))
    assert take_file(tmp_path / "mine.zip", tmp_path / "out")
    assert_text(tmp_path / "out")


def test_local_folder(tmp_path):
    inner = tmp_path / "mine" / "wikitext-103"
    inner.mkdir(parents=True)
    for split in SPLITS:
        split_path(inner, split).write_text(TEXT[split], encoding="utf-8")
    assert take_file(tmp_path / "mine", tmp_path / "out")
    assert_text(tmp_path / "out")


def test_folder_without_the_files(tmp_path):
    with pytest.raises(ValueError, match=r"^--file is .*; allowed"):
        take_file(tmp_path, tmp_path / "out")


def test_any_text_is_cut_in_three(tmp_path):
    lines = [f"line {i}\n" for i in range(200)]
    (tmp_path / "any.txt").write_text("".join(lines))
    assert not take_file(tmp_path / "any.txt", tmp_path / "out")
    parts = [split_path(tmp_path / "out", split).read_text() for split in SPLITS]
    assert "".join(parts) == "".join(lines)
    assert [part.count("\n") for part in parts] == [180, 10, 10]
    assert not take_file(tmp_path / "any.txt", tmp_path / "less", limit=100)
    assert count(split_path(tmp_path / "less", "train")) == Counts(90, 270)


@pytest.mark.parametrize("content", [b"too\nshort\n", b"\xff\xfe" * 100])
def test_text_that_cannot_be_used(tmp_path, content):
    (tmp_path / "any.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"any.txt.*allowed"):
        take_file(tmp_path / "any.txt", tmp_path / "out")


def test_check_says_what_differs(small, tmp_path):
    take_file(_zip(tmp_path, small), tmp_path)
    prepare.check(tmp_path)
    split_path(tmp_path, "valid").write_text("words\n")
    with pytest.raises(ValueError, match=r"wiki.valid.tokens .*\b1 .*\b2 .*allowed: 3 .*7"):
        prepare.check(tmp_path)


def test_shorten(tmp_path, small):
    out = tmp_path / "out"
    with working_folder(out, prepare.COMMAND):
        take_file(_zip(tmp_path, small), out)
        prepare.shorten(out, 2)
    assert [count(split_path(out, split)).lines for split in SPLITS] == [2, 2, 2]


def _zip(folder, content):
    (folder / "x.zip").write_bytes(content)
    return folder / "x.zip"


def test_command_makes_a_data_bin(tmp_path, imported_already, capsys):
    text = tmp_path / "any.txt"
    text.write_text("".join(f"the word {i % 7} again\n" for i in range(200)))
    arguments = ["--file", str(text), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert prepare.main(arguments) == 0
    assert "180 lines" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out" / "data-bin").iterdir()}
    assert {"dict.txt", "train.bin", "train.idx", "valid.bin", "test.bin"} <= names
