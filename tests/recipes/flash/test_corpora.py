"""Sources tried in turn, lists of checksums, resumed downloads, and the files a user has, against a local server."""

import gzip
import hashlib
import json
import sys
from functools import partial

import pytest

from recipes.flash import corpora, sources
from recipes.flash.corpora import CORPORA, check, fetch_corpus, find_corpus
from recipes.flash.sources import Record, Remote, fetch, hub_files, recorded_files
from recipes.shared.download import DownloadFailed
from tests.recipes.server import Page, serve

BOOKS = {"train/10.txt": b"a book", "train/2.txt": b"another", "validation/3.txt": b"third", "test/4.txt": b"fourth"}


def sha256(content):
    """Checksum in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def checksums(files, prefix, config):
    """A list as Hugging Face's library kept them."""
    entries = {prefix + name: {"num_bytes": len(body), "checksum": sha256(body)} for name, body in files.items()}
    return json.dumps({config: {"download_checksums": entries}}).encode()


def record(body, path, config):
    """The record of such a list."""
    return Record("0" * 40, path, len(body), sha256(body), config)


def use_record(monkeypatch, name, body, address, path, config):
    """Let ``corpora.name`` be the list ``body`` at the server, second of two addresses."""
    monkeypatch.setattr(corpora, name, record(body, path, config))
    monkeypatch.setattr(sources, "GITHUB_URLS", (f"{address}/dead", address + "/{commit}/{path}"))


def shard(texts):
    """A file of C4."""
    return gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


@pytest.fixture
def pg19(monkeypatch):
    """A server with the books above and their list; its pages."""
    body = checksums({**BOOKS, "metadata.csv": b"1,2"}, "gs://deepmind-gutenberg/", "default")
    pages = {"/" + "0" * 40 + "/datasets/pg19/dataset_infos.json": Page(body)}
    pages |= {f"/bucket/{name}": Page(content) for name, content in BOOKS.items()}
    with serve(pages) as served:
        use_record(monkeypatch, "PG19_RECORD", body, served.address, "datasets/pg19/dataset_infos.json", "default")
        monkeypatch.setattr(corpora, "PG19_BUCKET", served.address + "/bucket/")
        yield CORPORA["pg19"]._replace(listings=(corpora.list_pg19_bucket,)), pages, served


def test_books_with_recorded_checksums(pg19, tmp_path):
    corpus, _, served = pg19
    files = fetch_corpus(corpus, tmp_path, 1)
    assert {split: [path.name for path in paths] for split, paths in files.items()} == {
        "train": ["10.txt", "2.txt"],
        "valid": ["3.txt"],
        "test": ["4.txt"],
    }
    assert {name: (tmp_path / name).read_bytes() for name in BOOKS} == BOOKS
    requests = len(served.requests)
    assert fetch_corpus(corpus, tmp_path, 1) == files
    assert len(served.requests) == requests  # nothing is asked for again


def test_another_book_is_refused(pg19, tmp_path):
    corpus, pages, _ = pg19
    pages["/bucket/train/2.txt"] = Page(b"anothex")
    with pytest.raises(DownloadFailed, match=r"(?s)PG-19.*train/2.txt.*sha256.*--file"):
        fetch_corpus(corpus, tmp_path, 1)
    assert not (tmp_path / "train" / "2.txt").exists()


def test_an_interrupted_download_is_continued(pg19, tmp_path):
    corpus, pages, served = pg19
    pages["/bucket/test/4.txt"] = Page(b"fourth", cut=2)
    with pytest.raises(DownloadFailed, match="ended after 2 of 6 bytes"):
        fetch_corpus(corpus, tmp_path, 1)
    pages["/bucket/test/4.txt"] = Page(b"fourth")
    fetch_corpus(corpus, tmp_path, 1)
    assert ("/bucket/test/4.txt", "bytes=2-") in [request[:2] for request in served.requests]
    assert (tmp_path / "test" / "4.txt").read_bytes() == b"fourth"


def test_another_list_of_checksums_is_refused(tmp_path, monkeypatch):
    body = checksums(BOOKS, "", "default")
    with serve({"/" + "0" * 40 + "/a/b.json": Page(body[:-1] + b" ")}) as served:
        monkeypatch.setattr(sources, "GITHUB_URLS", (served.address + "/{commit}/{path}",))
        with pytest.raises(DownloadFailed, match=r"(?s)sha256.*a\.b\.json"):
            recorded_files(record(body, "a/b.json", "default"), tmp_path)


def hub_pages(files, dataset="some/data", revision="r", folder="en"):
    """Pages of a hub with ``files``."""
    tree = [{"type": "directory", "path": "x", "size": 0}]
    tree += [
        {"type": "file", "path": f"{folder}/{name}", "size": len(body), "lfs": {"oid": sha256(body)}}
        for name, body in files.items()
    ]
    pages = {f"/api/datasets/{dataset}/tree/{revision}/{folder}": Page(json.dumps(tree).encode())}
    resolve = f"/datasets/{dataset}/resolve/{revision}/{folder}"
    return pages | {f"{resolve}/{name}": Page(body) for name, body in files.items()}


def test_the_second_hub_is_tried(tmp_path, capsys):
    files = {"train-0.parquet": b"t", "validation-0.parquet": b"v", "test-0.parquet": b"x", "other.csv": b"o"}
    with serve(hub_pages(files)) as served:
        listings = tuple(
            partial(corpora.list_hub_parquet, hub, "some/data", "r", "en")
            for hub in ("http://127.0.0.1:9", served.address)
        )
        found = fetch_corpus(CORPORA["wiki40b"]._replace(listings=listings), tmp_path, 1)
    assert "127.0.0.1:9/api/datasets" in capsys.readouterr().out
    assert {split: [path.read_bytes() for path in paths] for split, paths in found.items()} == {
        "train": [b"t"],
        "valid": [b"v"],
        "test": [b"x"],
    }
    assert not (tmp_path / "other.csv").exists()


def test_nothing_is_asked_for_that_could_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with serve({}) as served:
        listing = partial(corpora.list_hub_parquet, served.address, "some/data", "r", "en")
        with pytest.raises(ValueError, match="some/data: .*'pyarrow<22'"):
            fetch_corpus(CORPORA["wiki40b"]._replace(listings=(listing,)), tmp_path, 1)
    assert not served.requests


def test_a_source_without_a_split_is_refused(tmp_path):
    with serve(hub_pages({"train-0.parquet": b"t", "test-0.parquet": b"x"})) as served:
        listing = partial(corpora.list_hub_parquet, served.address, "some/data", "r", "en")
        with pytest.raises(DownloadFailed, match=r"no files of valid"):
            fetch_corpus(CORPORA["wiki40b"]._replace(listings=(listing,)), tmp_path, 1)


@pytest.mark.parametrize("body", [b"<html>", b'{"error": "gone"}', b'[{"type": "file", "lfs": {}}]'])
def test_no_list_from_a_hub(body):
    with (
        serve({"/api/datasets/a/tree/r/en": Page(body)}) as served,
        pytest.raises(DownloadFailed, match="/tree/r/en: "),
    ):
        hub_files(served.address, "a", "r", "en")


def test_so_many_shards_of_c4(tmp_path, monkeypatch):
    files = {f"c4-train.{i:05d}-of-01024.json.gz": shard([f"t{i}"]) for i in range(4)}
    files |= {f"c4-validation.{i:05d}-of-00008.json.gz": shard([f"v{i}"]) for i in range(2)}
    prefix = "https://huggingface.co/datasets/allenai/c4/resolve/r/en/"
    body = checksums(files, prefix, "en")
    pages = {"/" + "0" * 40 + "/datasets/c4/dataset_infos.json": Page(body)}
    pages |= {"/datasets/allenai/c4/resolve/r/en/" + name: Page(content) for name, content in files.items()}
    with serve(pages) as served:
        use_record(monkeypatch, "C4_RECORD", body, served.address, "datasets/c4/dataset_infos.json", "en")
        corpus = CORPORA["c4"]._replace(listings=(partial(corpora.list_hub_c4, served.address),))
        found = fetch_corpus(corpus, tmp_path, 3)
    assert [path.name[:14] for path in found["train"]] == ["c4-train.00000", "c4-train.00001", "c4-train.00002"]
    assert len(found["valid"]) == 2
    assert set(found) == {"train", "valid"}  # there is no test split
    small = corpus._replace(documents={"train": 9, "valid": 2})
    check(small, found)  # a part of the training split is not counted
    with pytest.raises(ValueError, match="valid .*2 documents; allowed: 3"):
        check(small._replace(documents={"train": 9, "valid": 3}), found)
    with pytest.raises(ValueError, match="train .*3 documents; allowed: 9"):
        check(small._replace(train_files=3), found)


def test_a_failed_file_ends_the_others(tmp_path):
    with serve({}) as served:
        files = [Remote(f"{served.address}/{i}", str(i)) for i in range(200)]
        with pytest.raises(DownloadFailed, match="404"):
            fetch(files, tmp_path, at_once=2)
        assert len(served.requests) < 50


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


def test_real_addresses():
    listings = CORPORA["wiki40b"].listings
    assert [listing.args[0] for listing in listings] == ["https://huggingface.co", "https://hf-mirror.com"]
    assert corpora.C4_RECORD.urls[0] == (
        "https://raw.githubusercontent.com/huggingface/datasets/401d4c4f9b9594cb6527c599c0e7a72ce1a0ea49"
        "/datasets/c4/dataset_infos.json"
    )


def test_local_folder_and_files(tmp_path):
    for name in BOOKS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(BOOKS[name])
    (tmp_path / "metadata.csv").write_text("x")
    found = find_corpus(CORPORA["pg19"], [tmp_path], 1)
    assert [len(paths) for paths in found.values()] == [2, 1, 1]
    assert find_corpus(CORPORA["pg19"], [tmp_path / name for name in sorted(BOOKS)], 1) == {
        split: sorted(paths) for split, paths in found.items()
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
