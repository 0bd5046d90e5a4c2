"""A command only replaces its own files; if it is killed at any moment, either the old or the new files remain."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.files.folder_locks import FolderInUse
from common.files.output_files import MARK, find_untracked, new_folder, new_path, take
from tests.processes import CHECKOUT, run_program

COMMAND = "recipes.some"
#: Functions that change the disk, in the order of ``new_folder``; a process can be killed before each of them.
STEPS = [(Path, "mkdir"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (os, "unlink"), (os, "rmdir")]


def write(path: Path, content: str, command: str = COMMAND) -> None:
    """Write a folder of ``command`` with one file in a subfolder."""
    with new_folder(path, command) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "data.txt").write_text(content)


def content(path: Path) -> str | None:
    """The text that ``write`` wrote, or None if the folder is incomplete."""
    file = path / "inner" / "data.txt"
    return file.read_text() if file.is_file() and (path / MARK).is_file() else None


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder of the command, alone in its own."""
    write(tmp_path / "x", "old")
    return tmp_path / "x"


def test_a_folder_is_replaced_by_its_own_command_alone(old, tmp_path):
    write(old, "new")
    assert content(old) == "new" and os.listdir(tmp_path) == ["x"]
    with pytest.raises(ValueError, match=f"{COMMAND}.*allowed: .*other"):
        write(old, "newer", "other")
    assert content(old) == "new"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "link", "linked")
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "elsewhere") == "linked"


@pytest.mark.parametrize("name", ["thesis.txt", "inner/thesis.txt", "inner/deeper/thesis.txt", "inner/link"])
def test_a_strangers_file_in_a_folder_of_ours_stays(old, name):
    """Whether it was there before, or comes in meanwhile."""
    stranger = old / name

    def come_in():
        stranger.parent.mkdir(exist_ok=True)
        stranger.symlink_to("data.txt") if name.endswith("link") else stranger.write_text("years of work")

    with pytest.raises(ValueError, match=f"--out is {old}, which holds {name.rpartition('/')[0]}.*allowed"):
        with new_folder(old, COMMAND):
            come_in()
    with pytest.raises(ValueError, match=f"--out is {old}, which holds {name.rpartition('/')[0]}.*allowed"):
        write(old, "new")
    assert content(old) == "old" and os.path.lexists(stranger) and os.listdir(old.parent) == ["x"]


def test_an_error_leaves_the_old_folder_and_no_unfinished_work(old, tmp_path):
    with pytest.raises(OSError, match=f"No space left.*{old}"), new_folder(old, COMMAND):
        raise OSError(28, "No space left on device")
    assert content(old) == "old" and os.listdir(tmp_path) == ["x"]


def test_unfinished_work_of_others_stays(tmp_path):
    part = tmp_path / "x.part"
    for make in (lambda: part.write_text("the user's"), lambda: (part.mkdir(), (part / "notes").write_text("mine"))):
        make()
        with pytest.raises(ValueError, match=r"x\.part.*allowed"):
            write(tmp_path / "x", "new")
        with pytest.raises(ValueError, match=r"x\.part.*allowed"), new_path(tmp_path / "x", "target"):
            raise AssertionError
        assert os.listdir(tmp_path) == ["x.part"]
        assert part.is_file() or (part / "notes").read_text() == "mine"
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def killed_before(step: int, path: Path) -> bool:
    """Replace ``path`` in a process killed (as by kill -9) before change number ``step``; whether it was killed."""
    child = os.fork()
    if not child:
        count = itertools.count()

        def counted(original):
            def call(*arguments, **options):
                if next(count) == step:
                    os._exit(9)
                return original(*arguments, **options)

            return call

        for owner, name in STEPS:
            setattr(owner, name, counted(getattr(owner, name)))
        try:
            write(path, "new")
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_whenever_the_process_is_killed_the_old_folder_or_the_new_one_is_whole(tmp_path):
    """While the folder has no name, both versions exist, and the next run restores the old one."""
    for step in itertools.count():
        path = tmp_path / str(step) / "x"
        write(path, "old")
        killed = killed_before(step, path)
        text = content(path)
        assert text in ("old", "new") or content(path.with_name("x.part") / "old" / "x") == "old"
        with pytest.raises(KeyError), new_folder(path, COMMAND):  # a run that fails
            raise KeyError
        assert content(path) == (text or "old") and os.listdir(path.parent) == ["x"]
        write(path, "newest")
        assert content(path) == "newest" and os.listdir(path.parent) == ["x"]
        if not killed:
            break
    assert step > 10  # otherwise no change was counted


def test_a_new_path_is_whole_or_absent_and_never_replaces(tmp_path):
    folder = tmp_path / "a"
    with pytest.raises(KeyError), new_path(folder / "x.pt", "target") as part:
        part.write_text("half")
        raise KeyError
    assert not list(folder.iterdir())
    with new_path(folder / "x.pt", "target") as part:
        part.write_text("whole")
    with pytest.raises(ValueError, match=r"target is .*x\.pt.*allowed"), new_path(folder / "x.pt", "target"):
        raise AssertionError
    with pytest.raises(ValueError, match=r"target is .*y\.pt"), new_path(folder / "y.pt", "target") as part:
        part.write_text("ours")
        (folder / "y.pt").write_text("the user's")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"x.pt": "whole", "y.pt": "the user's"}


def test_strangers_are_found(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    folders = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert find_untracked(tmp_path, folders) is None and find_untracked(tmp_path / "none") is None
    assert find_untracked(tmp_path, folders[:1]) == folders[1] and find_untracked(tmp_path, folders[:2]) == folders[2]
    assert find_untracked(folders[2]) == folders[2] and find_untracked(folders[2], folders) is None


HOLDER = """
import sys, time
from pathlib import Path
from common.files.output_files import take
mark = take(Path(sys.argv[1]), "recipes.some", "--out")
print("taken", flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_owner_until_its_process_ends(tmp_path, monkeypatch, caplog):
    """A file system without locks is said."""
    command = [sys.executable, "-c", HOLDER, tmp_path / "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as holder:
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(FolderInUse, match=f"{tmp_path}/x; allowed"):
            take(tmp_path / "x", COMMAND, "--out")
        holder.kill()  # -9
    take(tmp_path / "x", COMMAND, "--out").close()

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    take(tmp_path / "x", COMMAND, "--out").close()
    assert caplog.text.count("\n") == 1 and str(tmp_path / "x") in caplog.text and "not supported" in caplog.text


@pytest.mark.parametrize("damage", [b"\xff\n", b"no JSON\n", b"7\n", b"{}\n", b"[" * 100_000 + b"\n"], ids=len)
def test_a_damaged_list_is_refused_and_a_line_that_was_cut_off_is_not(old, damage):
    with open(old / MARK, "ab") as file:
        file.write(b'"half a na')
    with pytest.raises(ValueError, match="which holds"):  # the file with the truncated name may be the user's own
        (old / "half a name").write_text("")
        write(old, "new")
    (old / MARK).write_bytes(damage)
    with pytest.raises(ValueError, match=f"{MARK} cannot be read.*allowed"):
        write(old, "new")


FULL = """
import resource, sys
from pathlib import Path
from common.files.output_files import MARK, take
folder = Path(sys.argv[1])
mark = take(folder, "recipes.some", "--out")
most, unlimited = (folder / MARK).stat().st_size + 5, resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited))
try:
    mark.note(folder / "report.md")
except OSError as error:
    print(error.filename)
resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
mark.note(folder / "other.md")
print(*(path.name for path in mark.made()))
"""


def test_a_name_that_does_not_fit_on_the_disk_is_an_error_and_leaves_no_half_line(tmp_path):
    printed = run_program(["-c", FULL, str(tmp_path)], cwd=str(CHECKOUT))
    assert printed.splitlines() == [str(tmp_path / MARK), "other.md"]


def test_an_old_folder_that_cannot_be_removed_is_named_by_the_next_run_and_then_goes(old, tmp_path, monkeypatch):
    with monkeypatch.context() as refusing:
        remove = shutil.rmtree

        def refuse(path, ignore_errors=False):
            if Path(path).name != "gone":
                remove(path, ignore_errors)
            elif not ignore_errors:
                raise PermissionError(13, "Permission denied", str(path))

        refusing.setattr(shutil, "rmtree", refuse)
        write(old, "new")
        assert content(old) == "new"
        with pytest.raises(PermissionError, match=r"x\.part/gone"):
            write(old, "newer")
    write(old, "newest")
    assert content(old) == "newest" and os.listdir(tmp_path) == ["x"]


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match=f"--out is {tmp_path}, a mount point.*allowed"), new_folder(tmp_path, COMMAND):
        raise AssertionError
    write(tmp_path / "x", "new")
