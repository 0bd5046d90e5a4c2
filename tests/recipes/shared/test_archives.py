"""Extracting files from zip archives: from any folder, completely, and nothing from damaged archives."""

import random

import pytest

from recipes.shared.archives import extract
from tests.recipes.archive_files import zipped

#: Incompressible, so that the middle byte of the archive belongs to the first file.
CONTENT = {"a.txt": random.Random(0).randbytes(4_000), "b.txt": b"second"}


@pytest.fixture
def archive(tmp_path):
    """An archive with both files in one folder."""
    path = tmp_path / "mine.zip"
    path.write_bytes(zipped({"folder/": b"", **{f"folder/{name}": content for name, content in CONTENT.items()}}))
    return path


def test_files_are_written_whole(archive, tmp_path):
    extract(archive, CONTENT, tmp_path / "out", "mine.zip")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == CONTENT


@pytest.mark.parametrize("damage", [lambda x: x[:300], lambda x: x[:2000] + b"....." + x[2005:], lambda x: b"no zip"])
def test_a_damaged_archive(archive, tmp_path, damage):
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(ValueError, match="mine.zip cannot be read: .*; allowed: yours.zip, whole"):
        extract(archive, CONTENT, tmp_path / "out", "yours.zip")
    assert not list((tmp_path / "out").glob("*"))


def test_a_file_that_the_archive_lacks(archive, tmp_path):
    with pytest.raises(ValueError, match="mine.zip lacks c.txt; allowed: yours.zip"):
        extract(archive, ["c.txt"], tmp_path / "out", "yours.zip")


def test_a_file_of_the_user_stays(archive, tmp_path):
    (tmp_path / "a.txt").write_text("the user's")
    with pytest.raises(ValueError, match=r"a\.txt"):
        extract(archive, CONTENT, tmp_path, "mine.zip")
    assert (tmp_path / "a.txt").read_text() == "the user's"
