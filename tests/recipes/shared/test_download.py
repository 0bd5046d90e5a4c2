"""Downloads end whole or not at all."""

import hashlib

import pytest

from recipes.shared.download import DownloadFailed, Source, download, file_digest
from tests.recipes.server import Page, serve

BODY = bytes(range(256)) * 40
SHA256 = hashlib.sha256(BODY).hexdigest()


def test_whole_file(tmp_path):
    with serve({"/x": Page(BODY)}) as served:
        download(Source(f"{served.address}/x", len(BODY), SHA256), tmp_path / "new" / "x")
    assert (tmp_path / "new" / "x").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x"]
    assert "Mozilla" in served.requests[0][2]


@pytest.mark.parametrize("size", [len(BODY), None])
def test_truncated_file_is_no_file_and_is_continued(tmp_path, size):
    pages = {"/x": Page(BODY, cut=1000)}
    with serve(pages) as served:
        with pytest.raises(DownloadFailed, match=f"ended after 1000 of {len(BODY)} bytes"):
            download(Source(f"{served.address}/x", size, SHA256), tmp_path / "x")
        assert not (tmp_path / "x").exists()
        pages["/x"] = Page(BODY)
        download(Source(f"{served.address}/x", size, SHA256), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BODY
    assert [asked for _, asked, _ in served.requests] == [None, "bytes=1000-"]


def begin(path, content):
    """A download that failed after ``content``."""
    with serve({"/x": Page(content + b"more", cut=len(content))}) as served, pytest.raises(DownloadFailed):
        download(Source(f"{served.address}/x", len(BODY) + 1), path)


def test_host_without_ranges_starts_again(tmp_path):
    begin(tmp_path / "x", b"something else")
    with serve({"/x": Page(BODY, ranges=False)}) as served:
        download(Source(f"{served.address}/x", len(BODY), SHA256), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_whole_part_needs_no_host(tmp_path):
    begin(tmp_path / "x", BODY)
    download(Source("http://127.0.0.1:9/x", len(BODY), SHA256), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BODY


def test_files_of_the_user_stay(tmp_path):
    """Neither a file of the name, nor one of the name of unfinished work, is continued or replaced."""
    for name, said in (("x", "x, a file"), ("y.part", "y.part, which is a file")):
        (tmp_path / name).write_bytes(b"the user's")
        with pytest.raises(ValueError, match=said):
            download(Source("http://127.0.0.1:9/x", len(BODY)), tmp_path / name.removesuffix(".part"))
        assert (tmp_path / name).read_bytes() == b"the user's"


def test_wrong_checksum_leaves_nothing(tmp_path):
    with serve({"/x": Page(BODY)}) as served, pytest.raises(DownloadFailed, match="has sha256 .*; allowed: 0000"):
        download(Source(f"{served.address}/x", len(BODY), "0" * 64), tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [len(BODY) + 1, len(BODY) - 1])
def test_wrong_size(tmp_path, size):
    with (
        serve({"/x": Page(BODY)}) as served,
        pytest.raises(DownloadFailed, match=f"has 10,240 bytes; allowed: {size:,}"),
    ):
        download(Source(f"{served.address}/x", size), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_refused_and_unreachable(tmp_path):
    with serve({"/x": Page(status=403)}) as served, pytest.raises(DownloadFailed, match=r"/x: HTTP Error 403"):
        download(Source(f"{served.address}/x"), tmp_path / "x")
    with pytest.raises(DownloadFailed, match=r"http://127.0.0.1:9/x: .*refused"):
        download(Source("http://127.0.0.1:9/x"), tmp_path / "x")


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_digest_of_a_file_of_several_blocks(tmp_path, algorithm):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert file_digest(tmp_path / "file", algorithm) == hashlib.new(algorithm, content).hexdigest()
