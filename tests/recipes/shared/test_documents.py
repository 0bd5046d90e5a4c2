"""Documents from every kind of file, cleaned, one at a time."""

import gzip
import json

import pyarrow
import pytest
from pyarrow.parquet import write_table

from recipes.shared import documents
from recipes.shared.documents import count_documents, paragraphs, read_all, read_documents

ARTICLE = "\n_START_ARTICLE_\nA title\n_START_SECTION_\nA heading\n_START_PARAGRAPH_\nOne line._NEWLINE_Another  one."
ARTICLE += "\u00a0End.\n"
TEXTS = ["first\n\n second\tline ", "", "th\u00efrd\u2028end"]


def parquet(path, texts, column="text"):
    """Write a Parquet file."""
    write_table(pyarrow.table({column: texts, "other": texts}), path, row_group_size=2)


def write(folder, suffix, texts):
    """Write ``texts`` to a file of the given kind."""
    path = folder / f"x{suffix}"
    if suffix == ".parquet":
        parquet(path, texts)
        return path
    lines = "".join(json.dumps({"url": "u", "text": text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()) if suffix == ".json.gz" else lines.encode())
    return path


def test_wiki40b_markers_end_paragraphs():
    assert paragraphs(ARTICLE) == ["A title", "A heading", "One line.", "Another one. End."]


def test_every_whitespace_is_a_space_or_an_end():
    assert paragraphs("a \t b\x85c\x1cd\n \u2003\n\fe\u200b\n") == ["a b", "c", "d", "e\u200b"]


@pytest.mark.parametrize("suffix", [".parquet", ".json.gz", ".json", ".jsonl"])
def test_a_document_a_row(tmp_path, suffix):
    path = write(tmp_path, suffix, TEXTS)
    assert list(read_documents(path)) == TEXTS
    assert count_documents(path) == 3
    assert list(read_all([path, path], limit=4)) == [
        ["first", "second line"],
        [],
        ["th\u00efrd", "end"],
        ["first", "second line"],
    ]


def test_a_book_is_a_document_and_a_line_of_a_trial_is_one(tmp_path):
    for name, expected in (("10.txt", ["a\n\nb\n"]), ("train.lines", ["a\n", "\n", "b\n"])):
        (tmp_path / name).write_text("a\n\nb\n")
        assert list(read_documents(tmp_path / name)) == expected
        assert count_documents(tmp_path / name) == len(expected)


def test_files_are_opened_when_their_turn_comes(tmp_path):
    (tmp_path / "1.txt").write_text("one")
    stream = read_all([tmp_path / "1.txt", tmp_path / "missing.txt"])
    assert next(stream) == ["one"]
    with pytest.raises(FileNotFoundError):
        next(stream)


def test_a_row_is_read_before_the_next_batch_is(tmp_path, monkeypatch):
    path = write(tmp_path, ".json.gz", ["x" * 1000] * 1000)
    rows_read = []
    loads = json.loads
    monkeypatch.setattr(documents.json, "loads", lambda line: rows_read.append(1) or loads(line))
    next(read_all([path]))
    assert len(rows_read) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".json.gz"])
def test_truncated(tmp_path, suffix):
    path = write(tmp_path, suffix, [f"some text {i}" for i in range(3000)])
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(ValueError, match=rf"x{suffix}.*allowed"):
        list(read_documents(path))


def test_without_a_text(tmp_path):
    (tmp_path / "x.json").write_text('{"body": 1}\n')
    with pytest.raises(ValueError, match=r"x.json: KeyError\('text'\); allowed: .*JSON"):
        list(read_documents(tmp_path / "x.json"))
    parquet(tmp_path / "x.parquet", ["a"], column="body")
    with pytest.raises(ValueError, match="column text .*body, other"):
        list(read_documents(tmp_path / "x.parquet"))


def test_other_files(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"1.txt: .*; allowed"):
        list(read_documents(tmp_path / "1.txt"))
    with pytest.raises(ValueError, match=r"x.zip .*allowed: .*\.parquet"):
        read_documents(tmp_path / "x.zip")
