"""Files: nothing that is read runs code, and a command only replaces its own.

If it is killed at any moment, either the old or the new files remain.
"""

import errno
import itertools
import os
import pickle
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common.checkpoints import LoadReport, check_state_dict, read_checkpoint
from common.files.folder_locks import FolderInUse
from common.files.output_files import MARK, new_folder, new_path, take
from common.files.tensor_files import read_safetensors, save, save_safetensors
from common.modules.relative_bias import ToeplitzBias

WHOLE = torch.arange(6.0).reshape(2, 3)
STATE = {"x": WHOLE, "transposed": WHOLE.t(), "half": torch.ones(2, dtype=torch.float16), "one": torch.tensor(3)}
FULL = Path("/dev/full")

# Reading


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


class _Unknown:
    """A class that is on no list of allowed classes."""


def torch_file(state: Any, share: float = 1.0, **options: Any) -> Callable[[Path], None]:
    """Write a part of a file of ``torch.save``."""

    def write(path: Path) -> None:
        torch.save(state, path, **options)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])

    return write


OLD = {"_use_new_zipfile_serialization": False}


WRITERS = {
    "c.pt": torch.save,
    "old.pt": partial(torch.save, **OLD),
    "ours.pt": save,
    "c.safetensors": lambda state, path: save_file({name: x.clone().contiguous() for name, x in state.items()}, path),
    "ours.safetensors": partial(save_safetensors, metadata={"format": "mine"}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_checkpoint_is_read(tmp_path: Path, name: str) -> None:
    """Both of torch's formats, safetensors, and ours, from a path object or a string; a large file is mapped."""
    path = tmp_path / name
    WRITERS[name](STATE, path)
    before = path.read_bytes()
    for given in (path, str(path)):
        content = read_checkpoint(given)
        assert content.keys() == STATE.keys()
        assert all(torch.equal(content[key], x) and content[key].dtype == x.dtype for key, x in STATE.items())
    if name == "c.pt":
        assert str(path) in Path("/proc/self/maps").read_text()
        content["x"] += 1
    assert path.read_bytes() == before
    assert name != "ours.safetensors" or read_safetensors(path)[1] == {"format": "mine"}


CUT = "cannot be read, it may be cut short"
REFUSED = {
    "half of a file": (torch_file(STATE, 0.5), CUT),
    "a file without its last bytes": (torch_file(STATE, 0.97), CUT),
    "half of an old file": (torch_file(STATE, 0.5, **OLD), CUT),
    "an empty file": (lambda path: path.write_bytes(b""), CUT),
    "text": (lambda path: path.write_text("hello\nworld\n"), CUT),
    "a pickle that runs code": (torch_file({"a": _Attack()}), "code or classes that are not allowed: posix.system"),
    "an old one": (torch_file({"a": _Attack()}, **OLD), "code or classes that are not allowed: posix.system"),
    "a plain one": (lambda path: path.write_bytes(pickle.dumps(_Attack())), "is no checkpoint"),
    "a class": (torch_file({"a": _Unknown()}), r"not allowed: .*test_files\._Unknown"),
    "a list": (torch_file([1]), "holds a list; allowed"),
    "a folder": (lambda path: path.mkdir(), "is no file"),
    "nothing": (lambda path: None, "is no file"),
    "safetensors: empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "safetensors: short": (lambda path: path.write_bytes(b"abc"), "cannot be read"),
    "safetensors: huge": (lambda path: path.write_bytes(struct.pack("<Q", 10**9) + b"{}"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One ValueError names the file and what is allowed; nothing in the file is executed."""
    monkeypatch.chdir(tmp_path)
    write, reason = REFUSED[case]
    path = tmp_path / ("c.safetensors" if case.startswith("safetensors") else "c.pt")
    write(path)
    with pytest.raises(ValueError, match=f"(?s){path.name}' .*{reason}.*") as refusal:
        read_checkpoint(path)
    assert "allowed: " in str(refusal.value) and "\n" not in str(refusal.value)
    assert not Path("executed").exists()


class Model(nn.Module):
    """A linear layer and a relative bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(3, 2), ToeplitzBias(4)


def changed(**changes: Any) -> dict[str, Any]:
    """A state dict of ``Model`` with other entries."""
    state = {**Model().state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in state.items() if value is not None}


MISMATCHES = [
    (changed(linear__bias=None), ["1 missing (linear.bias)"]),
    (changed(more=torch.ones(1)), ["1 not of this model (more)"]),
    (changed(linear__weight=torch.ones(3, 2)), ["1 of other shapes (linear.weight (3, 2), not (2, 3))"]),
    (changed(linear__weight=[1.0]), ["linear.weight a list, not (2, 3)"]),
    (changed(bias__weight=torch.ones(1, 5)), ["bias.weight (1, 5), not (1, 7)"]),
    (changed(linear__bias=None, a=torch.ones(1), linear__weight=torch.ones(1)), ["1 of", "1 missing", "1 not"]),
]


def test_a_state_dict_is_checked_as_a_whole() -> None:
    """One error has names and shapes. A longer relative bias is cut; with ``shapes_only``, other names are allowed."""
    for state, parts in MISMATCHES:
        with pytest.raises(ValueError, match="does not fit Model: .*allowed: .*Nothing was loaded") as refusal:
            check_state_dict(state, Model())
        assert all(part in str(refusal.value) for part in parts)
    for accepted in (changed(), changed(bias__weight=torch.ones(1, 9))):
        check_state_dict(accepted, Model())
    check_state_dict(changed(linear__bias=None, more=torch.ones(1)), Model(), shapes_only=True)
    with pytest.raises(ValueError, match="1 of other shapes"):
        check_state_dict(changed(linear__bias=torch.ones(1)), Model(), shapes_only=True)
    summary = LoadReport(["a", "b"], ["c"], [f"d{i}" for i in range(5)]).summary()
    assert summary == "2 tensors taken as a starting point; 1 left out (c); 5 new (d0, d1, d2, d3, ...)"


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("write", [save, lambda tensors, path: save_safetensors(tensors, path, {})])
def test_a_full_disk_is_an_os_error(write):
    with pytest.raises(OSError) as error:
        write({"x": torch.zeros(100_000)}, FULL)
    assert error.value.errno == errno.ENOSPC


# Folders and paths of a command

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


def fork(work: Callable[[], Any]) -> int:
    """The id of a new process that does ``work``."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def status_of(child: int) -> int:
    """Wait for the end of a process; its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder of the command, alone in its own."""
    write(tmp_path / "x", "old")
    return tmp_path / "x"


def test_a_folder_is_replaced_by_its_own_command_alone(old, tmp_path):
    """An error leaves the old one, and no unfinished work."""
    write(old, "new")
    assert content(old) == "new" and os.listdir(tmp_path) == ["x"]
    with pytest.raises(ValueError, match=f"{COMMAND}.*allowed: .*other"):
        write(old, "newer", "other")
    with pytest.raises(OSError, match=f"No space left.*{old}"), new_folder(old, COMMAND):
        raise OSError(28, "No space left on device")
    assert content(old) == "new" and os.listdir(tmp_path) == ["x"]
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

    refused = f"--out is {old}, which holds {name.rpartition('/')[0]}.*allowed"
    with pytest.raises(ValueError, match=refused), new_folder(old, COMMAND):
        come_in()
    with pytest.raises(ValueError, match=refused):
        write(old, "new")
    assert content(old) == "old" and os.path.lexists(stranger) and os.listdir(old.parent) == ["x"]


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

    def work() -> None:
        count = itertools.count()

        def counted(original):
            def call(*arguments, **options):
                if next(count) == step:
                    os._exit(9)
                return original(*arguments, **options)

            return call

        for owner, name in STEPS:
            setattr(owner, name, counted(getattr(owner, name)))
        write(path, "new")

    return status_of(fork(work)) == 9


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


def test_a_folder_has_one_owner_until_its_process_ends(tmp_path, monkeypatch, caplog):
    """A file system without locks is said."""
    folder, taken = tmp_path / "x", tmp_path / "taken"

    def hold() -> None:
        mark = take(folder, COMMAND, "--out")
        taken.touch()
        time.sleep(60)
        mark.close()

    holder = fork(hold)
    while not taken.exists():
        time.sleep(0.01)
    with pytest.raises(FolderInUse, match=f"{folder}; allowed"):
        take(folder, COMMAND, "--out")
    os.kill(holder, signal.SIGKILL)
    assert status_of(holder) == -signal.SIGKILL
    take(folder, COMMAND, "--out").close()

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    take(folder, COMMAND, "--out").close()
    assert caplog.text.count("\n") == 1 and str(folder) in caplog.text and "not supported" in caplog.text


def test_a_name_that_does_not_fit_on_the_disk_is_an_error_and_leaves_no_half_line(tmp_path):
    """A line that was cut off names nothing: a file of that name may be the user's own."""

    def fill() -> None:
        mark, unlimited = take(tmp_path, COMMAND, "--out"), resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / MARK).stat().st_size + 5, unlimited))
        with pytest.raises(OSError) as error:
            mark.note(tmp_path / "report.md")
        assert error.value.filename == str(tmp_path / MARK)
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        mark.note(tmp_path / "other.md")
        assert [path.name for path in mark.made()] == ["other.md"]

    assert status_of(fork(fill)) == 0
    write(tmp_path / "x", "old")
    with open(tmp_path / "x" / MARK, "ab") as file:
        file.write(b'"half a na')
    (tmp_path / "x" / "half a name").write_text("")
    with pytest.raises(ValueError, match="which holds"):
        write(tmp_path / "x", "new")


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
