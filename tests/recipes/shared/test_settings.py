"""The settings of a folder: what a refused run leaves, and that a later one cannot change them."""

import shutil

import pytest

from common.files.output_files import MARK
from recipes.shared.json_files import read_json
from recipes.shared.settings import begun_with, given
from recipes.shared.working_folder import working_folder, write_text


def run(folder, settings, error=None):
    """A run that writes ours.txt and ends with ``error``."""
    with working_folder(folder, "recipes.some"), begun_with(folder / "settings.json", settings, ["ours.txt", "made"]):
        write_text(folder / "ours.txt", str(settings))
        write_text(folder / "made" / "more.txt", str(settings))
        if error is not None:
            raise error


def test_a_refused_run_leaves_nothing_that_binds_the_folder(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match="too few"):
        run(folder, {"lines": 1}, ValueError("too few"))
    assert [path for path in folder.rglob("*") if path.is_file() and path.name != MARK] == []
    run(folder, {"lines": 2})
    assert read_json(folder / "settings.json") == {"lines": 2}
    with pytest.raises(ValueError, match="lines is 3; allowed in .*out: 2"):
        run(folder, {"lines": 3})
    assert (folder / "ours.txt").read_text() == "{'lines': 2}"


@pytest.mark.parametrize("first", [OSError("disk full"), KeyboardInterrupt(), None])
def test_what_an_earlier_run_made_outlives_a_refusal(first, tmp_path):
    """After an interruption, a failure, or a complete run."""
    folder = tmp_path / "out"
    if first is None:
        run(folder, {"lines": 2})
    else:
        with pytest.raises(type(first)):
            run(folder, {"lines": 2}, first)
    with pytest.raises(ValueError, match="too few"):
        run(folder, {"lines": 2}, ValueError("too few"))
    assert (folder / "made" / "more.txt").exists() and read_json(folder / "settings.json") == {"lines": 2}


def test_a_users_file_among_what_was_made_stays(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match="too few"), working_folder(folder, "recipes.some"):
        with begun_with(folder / "settings.json", {"lines": 1}, ["made"]):
            write_text(folder / "made" / "more.txt", "ours")
            (folder / "made" / "thesis.txt").write_text("years of work")
            raise ValueError("too few")
    assert not (folder / "made" / "more.txt").exists() and not (folder / "settings.json").exists()
    assert (folder / "made" / "thesis.txt").read_text() == "years of work"


def test_the_digest_of_a_folder_is_of_contents_and_of_paths(tmp_path):
    """Not of where the folder is, nor of files that are not asked for."""
    folder, moved = tmp_path / "texts", tmp_path / "elsewhere" / "texts"
    for name in ("a/one.txt", "b/two.txt", "b/more.log"):
        write_text(folder / name, name)
    begun = given("file", folder, ["**/*.txt"])
    assert given("file", shutil.copytree(folder, moved), ["**/*.txt"]) == begun
    (moved / "b" / "more.log").write_text("another")
    assert given("file", moved, ["**/*.txt"]) == begun
    for change in ("another", "b/two.txt"):
        (moved / "b" / "two.txt").write_text(change)
        assert (given("file", moved, ["**/*.txt"]) == begun) == (change == "b/two.txt")
    (moved / "b" / "two.txt").rename(moved / "b" / "three.txt")  # the order is the same
    assert given("file", moved, ["**/*.txt"])["file_sha256"] != begun["file_sha256"]
    assert given("file", moved, ["*.wav"]) == {"file": "texts", "file_sha256": None}
