"""Files of the Hugging Face Hub, from a local server in its place."""

import sys

import pytest

from recipes.shared.download import DownloadFailed
from recipes.shared.hub import HubFolder, fetch_hub
from tests.recipes.server import Page, hub_pages, serve, use_hub

FOLDER = HubFolder("some/data", "r" * 40, "en")
FILES = {"en/train-0.parquet": b"train" * 100, "en/train-1.parquet": b"more", "en/test-0.parquet": b"test"}


@pytest.fixture
def pages(monkeypatch):
    """A hub with the files above: its pages and requests."""
    served_pages = hub_pages(FOLDER.dataset, FOLDER.revision, FILES)
    with serve(served_pages) as served:
        use_hub(monkeypatch, served.address)
        yield served_pages, served.requests


def test_chosen_files_are_downloaded_once(pages, tmp_path):
    messages = []

    def choose(names):
        messages.append(names)
        return names[::2]

    for _ in range(2):
        paths = fetch_hub(FOLDER, tmp_path, choose)
        assert {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in paths} == {
            name: FILES[name] for name in sorted(FILES)[::2]
        }
    assert messages == [sorted(FILES)] * 2, "neither folders nor small files"
    assert not (tmp_path / "en" / "train-0.parquet").exists()
    assert sum("/resolve/" in path and "test-0" in path for path, _, _ in pages[1]) == 2, "HEAD and GET"


def test_another_file_than_the_hub_lists_is_refused(pages, tmp_path):
    (name,) = [path for path in pages[0] if path.endswith("train-1.parquet")]
    pages[0][name] = Page(b"mode")
    with pytest.raises(DownloadFailed, match=r"some/data.*train-1.parquet has sha256 .*; allowed: "):
        fetch_hub(FOLDER, tmp_path, list)
    assert not (tmp_path / "en" / "train-1.parquet").exists()
    pages[0][name] = Page(b"more")
    assert len(fetch_hub(FOLDER, tmp_path, list)) == 3


@pytest.mark.parametrize("page", [Page(b"<html>"), Page(b'{"error": "gone"}'), Page(status=404)])
def test_no_list_from_the_hub(pages, tmp_path, page):
    (name,) = [path for path in pages[0] if "/tree/" in path]
    pages[0][name] = page
    with pytest.raises(DownloadFailed, match="some/data at rrrrrrrr: "):
        fetch_hub(FOLDER, tmp_path, list)


def test_without_huggingface_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match="some/data.*pip install huggingface_hub"):
        fetch_hub(FOLDER, tmp_path, list)
