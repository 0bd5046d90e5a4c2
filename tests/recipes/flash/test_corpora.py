"""Corpora from their sources, served locally, and from a user's files."""

import gzip
import json
import sys

import pytest

from recipes.flash import books
from recipes.flash.books import fetch_all
from recipes.flash.corpora import CORPORA, check, fetch_corpus, find_corpus
from recipes.shared.download import DownloadFailed, Source
from recipes.shared.hub import HubFolder
from recipes.shared.sources import SOURCES
from tests.recipes.server import Page, hub_pages, serve, sha256, use_hub

BOOKS = {"train/10.txt": b"a book", "train/2.txt": b"another", "validation/3.txt": b"third", "test/4.txt": b"fourth"}
TABLES = {"en/train-0.parquet": b"t", "en/validation-0.parquet": b"v", "en/test-0.parquet": b"x", "en/other.csv": b"o"}
HUB = HubFolder("some/data", "r" * 40, "en")


def checksums(files):
    """The list of checksums in the format of Hugging Face's library."""
    entries = {
        f"gs://deepmind-gutenberg/{name}": {"num_bytes": len(body), "checksum": sha256(body)}
        for name, body in files.items()
    }
    return json.dumps({"default": {"download_checksums": entries}}).encode()


@pytest.fixture
def pages(monkeypatch):
    """A server with the books above, their list, and a hub: its pages and requests."""
    body = checksums({**BOOKS, "metadata.csv": b"1,2"})
    served_pages = {"/list.json": Page(body)} | {f"/bucket/{name}": Page(content) for name, content in BOOKS.items()}
    with serve(served_pages) as served:
        monkeypatch.setitem(SOURCES, "pg19_checksums", Source(f"{served.address}/list.json", len(body), sha256(body)))
        monkeypatch.setattr(books, "BUCKET", f"{served.address}/bucket/")
        use_hub(monkeypatch, served.address)
        yield served_pages, served.requests


def contents(files):
    """The content of the files of each split."""
    return {split: [path.read_bytes() for path in paths] for split, paths in files.items()}


def test_books_with_recorded_checksums(pages, tmp_path):
    files = fetch_corpus(CORPORA["pg19"], tmp_path, 1)
    assert contents(files) == {"train": [b"a book", b"another"], "valid": [b"third"], "test": [b"fourth"]}
    requests = len(pages[1])
    assert fetch_corpus(CORPORA["pg19"], tmp_path, 1) == files
    assert len(pages[1]) == requests, "nothing is asked for again"


def test_a_book_is_continued_and_checked(pages, tmp_path):
    """If the bucket fails, the hub is tried, which is empty here."""
    pages[0]["/bucket/test/4.txt"], pages[0]["/bucket/train/2.txt"] = Page(b"fourth", cut=2), Page(b"anothex")
    for message in ("ended after 2 of 6 bytes|train/2.txt.*sha256", "emozilla/pg19", "--file"):
        with pytest.raises(DownloadFailed, match=f"(?s)PG-19.*({message})"):
            fetch_corpus(CORPORA["pg19"], tmp_path, 1)
    assert not (tmp_path / "train" / "2.txt").exists()
    pages[0]["/bucket/test/4.txt"], pages[0]["/bucket/train/2.txt"] = Page(b"fourth"), Page(b"another")
    assert contents(fetch_corpus(CORPORA["pg19"], tmp_path, 1))["test"] == [b"fourth"]


def test_the_hub_is_tried_after_the_bucket(pages, tmp_path, capsys):
    del pages[0]["/list.json"]
    pages[0].update(hub_pages(HUB.dataset, HUB.revision, TABLES))
    files = fetch_corpus(CORPORA["pg19"]._replace(hub=HUB), tmp_path, 1)
    assert contents(files) == {"train": [b"t"], "valid": [b"v"], "test": [b"x"]}
    assert "list.json" in capsys.readouterr().out
    assert not list(tmp_path.rglob("other.csv"))


def test_nothing_is_downloaded_that_could_not_be_read(pages, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    pages[0].update(hub_pages(HUB.dataset, HUB.revision, TABLES))
    with pytest.raises(ValueError, match="some/data: .*'pyarrow<22'"):
        fetch_corpus(CORPORA["wiki40b"]._replace(hub=HUB), tmp_path, 1)
    assert not any("/resolve/" in path for path, _, _ in pages[1])


def test_a_source_without_a_split_is_refused(pages, tmp_path):
    pages[0].update(hub_pages(HUB.dataset, HUB.revision, {"en/train-0.parquet": b"t", "en/test-0.parquet": b"x"}))
    with pytest.raises(DownloadFailed, match=r"no files of valid"):
        fetch_corpus(CORPORA["wiki40b"]._replace(hub=HUB), tmp_path, 1)


def test_a_list_of_checksums_that_is_none(pages, tmp_path, monkeypatch):
    body = b'{"default": {}}'
    pages[0]["/list.json"] = Page(body)
    monkeypatch.setitem(SOURCES, "pg19_checksums", SOURCES["pg19_checksums"]._replace(size=len(body), sha256=None))
    with pytest.raises(ValueError, match=r"list.json is no list of checksums.*download_checksums"):
        fetch_corpus(CORPORA["pg19"], tmp_path, 1)


def shard(text):
    """A file of C4 with one page."""
    return gzip.compress(json.dumps({"text": text}).encode() + b"\n")


def test_so_many_shards_of_c4(pages, tmp_path):
    files = {f"en/c4-train.{i:05d}-of-01024.json.gz": shard(f"t{i}") for i in range(4)}
    files |= {f"en/c4-validation.{i:05d}-of-00008.json.gz": shard(f"v{i}") for i in range(2)}
    pages[0].update(hub_pages(HUB.dataset, HUB.revision, files))
    corpus = CORPORA["c4"]._replace(hub=HUB)
    corpus_files = fetch_corpus(corpus, tmp_path, 3)
    assert [path.name[:14] for path in corpus_files["train"]] == ["c4-train.00000", "c4-train.00001", "c4-train.00002"]
    assert len(corpus_files["valid"]) == 2 and set(corpus_files) == {"train", "valid"}, "there is no test split"
    small = corpus._replace(documents={"train": 9, "valid": 2})
    check(small, corpus_files)  # documents are not counted for part of the training split
    with pytest.raises(ValueError, match="valid .*2 documents; allowed: 3"):
        check(small._replace(documents={"train": 9, "valid": 3}), corpus_files)
    with pytest.raises(ValueError, match="train .*3 documents; allowed: 9"):
        check(small._replace(train_files=3), corpus_files)


def test_a_failed_file_ends_the_others(pages, tmp_path):
    address = books.BUCKET.removesuffix("/bucket/")
    with pytest.raises(DownloadFailed, match="404"):
        fetch_all({str(i): Source(f"{address}/{i}") for i in range(400)}, tmp_path)
    assert len(pages[1]) < 100


@pytest.mark.parametrize(
    "name, path, split",
    [
        ("wiki40b", "en/train-00000-of-00019.parquet", "train"),
        ("wiki40b", "validation-00001-of-00002.parquet", "valid"),
        ("pg19", "train-00000-of-00023-5263dc4323e881d2.parquet", "train"),
        ("pg19", "some/validation/12.txt", "valid"),
        ("c4", "en/c4-validation.00000-of-00008.json.gz", "valid"),
        ("c4", "c4-train.00001-of-01024.json", "train"),
        ("pg19", "metadata.csv", None),
        ("wiki40b", "strain-0.parquet", None),
    ],
)
def test_split_of(name, path, split):
    assert CORPORA[name].split_of(path) == split


def test_local_folder_and_files(tmp_path):
    for name in BOOKS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(BOOKS[name])
    (tmp_path / "metadata.csv").write_text("x")
    corpus_files = find_corpus(CORPORA["pg19"], [tmp_path], 1)
    assert [len(paths) for paths in corpus_files.values()] == [2, 1, 1]
    assert find_corpus(CORPORA["pg19"], [tmp_path / name for name in sorted(BOOKS)], 1) == {
        split: sorted(paths) for split, paths in corpus_files.items()
    }


def test_a_local_text_is_a_trial(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    assert find_corpus(CORPORA["pg19"], [tmp_path / "mine.txt"], 1) is None


def test_local_files_that_cannot_be_used(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "1.txt").write_text("x")
    (tmp_path / "mine.txt").write_text("x")
    pg19 = CORPORA["pg19"]
    with pytest.raises(ValueError, match=r"^--file is .*valid, test; allowed: .*PG-19"):
        find_corpus(pg19, [tmp_path], 1)
    with pytest.raises(ValueError, match=r"^--file is .*none.*; allowed"):
        find_corpus(pg19, [tmp_path / "none"], 1)
    with pytest.raises(ValueError, match=r"mine.txt; allowed.*PG-19"):
        find_corpus(pg19, [tmp_path / "train" / "1.txt", tmp_path / "mine.txt"], 1)
