"""Downloads are complete or absent: hosts with limited features; ``test_sources.py`` has the usual ones."""

import hashlib

import pytest

from recipes.shared.download import DownloadFailed, Source, download, file_digest
from tests.recipes.server import Page, serve

BODY = bytes(range(256)) * 40
SHA256 = hashlib.sha256(BODY).hexdigest()


def begin(path, content):
    """A download that was interrupted after ``content``."""
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
    """Neither a file of the same name nor one with the name of a partial download is continued or replaced."""
    for name, message in (("x", "x, a file"), ("y.part", "y.part, which is a file")):
        (tmp_path / name).write_bytes(b"the user's")
        with pytest.raises(ValueError, match=message):
            download(Source("http://127.0.0.1:9/x", len(BODY)), tmp_path / name.removesuffix(".part"))
        assert (tmp_path / name).read_bytes() == b"the user's"


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
