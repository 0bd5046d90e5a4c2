"""The folder of a resumable command: its own files are replaced, and no others."""

import os

import pytest

from common.files.output_files import MARK
from recipes.shared.json_files import read_json, write_json
from recipes.shared.working_folder import atomic_write, register, remove_own, working_folder, write_text

COMMAND = "recipes.some"


def test_own_files_are_replaced_in_this_run_and_the_next(tmp_path):
    for text in ("one", "two"):
        with working_folder(tmp_path / "x", COMMAND):
            for name in ("a.txt", "logs/b.txt"):
                write_text(tmp_path / "x" / name, text)
                write_text(tmp_path / "x" / name, text + "!")
    assert (tmp_path / "x" / "logs" / "b.txt").read_text() == "two!"
    assert sorted(os.listdir(tmp_path / "x")) == [MARK, "a.txt", "logs"]


@pytest.mark.parametrize("name", ["b.txt", "b.txt.part", "logs/b.txt"])
def test_a_strangers_file_of_a_name_of_ours_stays(tmp_path, name):
    with working_folder(tmp_path, COMMAND):
        write_text(tmp_path / "a.txt", "ours")
    stranger = tmp_path / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("the user's")
    with working_folder(tmp_path, COMMAND), pytest.raises(ValueError, match=f"{stranger}.*allowed"):
        write_text(tmp_path / name.removesuffix(".part"), "ours")
    assert stranger.read_text() == "the user's"


def test_a_link_in_place_of_an_own_file_stays(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with working_folder(tmp_path / "x", COMMAND):
        write_text(tmp_path / "x" / "a.txt", "ours")
        (tmp_path / "x" / "a.txt").unlink()
        (tmp_path / "x" / "a.txt").symlink_to(tmp_path / "thesis.txt")
        with pytest.raises(ValueError, match="allowed"):
            write_text(tmp_path / "x" / "a.txt", "ours")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_another_commands_folder_and_one_with_files_are_refused(tmp_path):
    with working_folder(tmp_path / "x", COMMAND):
        write_text(tmp_path / "x" / "a.txt", "ours")
    with pytest.raises(ValueError, match=f"x, a folder of {COMMAND}; allowed: .*other"):
        with working_folder(tmp_path / "x", "other"):
            raise AssertionError
    with pytest.raises(ValueError, match="which holds x.*allowed"), working_folder(tmp_path, COMMAND):
        raise AssertionError
    assert os.listdir(tmp_path) == ["x"]


def test_a_command_that_fails_at_once_leaves_no_folder(tmp_path):
    for folder in (tmp_path / "x", tmp_path):
        with pytest.raises(KeyError), working_folder(folder, COMMAND):
            raise KeyError
        assert not os.listdir(tmp_path)


def test_an_error_leaves_neither_half_a_file_nor_a_changed_one(tmp_path):
    with working_folder(tmp_path, COMMAND):
        for before in (None, "old"):
            if before:
                write_text(tmp_path / "a.txt", before)
            path = tmp_path / "a.txt"
            with pytest.raises(OSError, match=f"No space left.*{path}"), atomic_write(path) as part:
                part.write_text("half")
                raise OSError(28, "No space left on device")
            contents = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != MARK}
            assert contents == ({"a.txt": before} if before else {})


def test_only_own_files_are_removed(tmp_path):
    with working_folder(tmp_path, COMMAND):
        register(tmp_path / "blocks").mkdir()
        for name in ("1", "2"):
            write_text(tmp_path / "blocks" / name, name)
        (tmp_path / "blocks" / "notes").write_text("the user's")
        remove_own(tmp_path / "blocks")
        assert os.listdir(tmp_path / "blocks") == ["notes"]
        (tmp_path / "blocks" / "1").write_text("the user's")  # the name is free again
        with pytest.raises(ValueError, match="blocks/1"):
            write_text(tmp_path / "blocks" / "1", "ours")
        (tmp_path / "blocks" / "1").unlink()
        (tmp_path / "blocks" / "notes").unlink()
        remove_own(tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"b": 1}', "\udcff"])
def test_a_damaged_file_of_ours_is_named(tmp_path, text):
    write_json(tmp_path / "x.json", {"a": 1})
    assert read_json(tmp_path / "x.json", a=int) == {"a": 1}
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"x\.json .*allowed"):
        read_json(tmp_path / "x.json", a=int)


def test_nothing_outside_of_the_folder_is_removed(tmp_path):
    """Neither by ".." in the list of a copied folder, nor through a link that replaced a folder."""
    folder, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("1", "2"):
        (elsewhere / name).write_text("the user's")
    with working_folder(folder, COMMAND):
        write_text(folder / "a.txt", "ours")
        write_text(register(folder / "blocks") / "1", "ours")
        (folder / "blocks" / "1").unlink()
        (folder / "blocks").rmdir()
        (folder / "blocks").symlink_to(elsewhere)
        remove_own(folder / "blocks")
        (folder / "blocks").unlink()
    with open(folder / MARK, "a") as file:
        file.write('"blocks/../../elsewhere/2"\n')
    (folder / "blocks").mkdir()
    with working_folder(folder, COMMAND):
        remove_own(folder / "blocks")
    assert sorted(os.listdir(elsewhere)) == ["1", "2"]
