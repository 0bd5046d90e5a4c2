"""Stored machine code of kernels: unwritable, full, damaged, shared by processes, and of changed source files.

Each test has a copy of the files of ``common.ops.shared.cpu`` that need no torch, with a small kernel.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import CHECKOUT, LIMIT

pytest.importorskip("numba")

KERNELS = """
from . import fours
from .compiler import kernel
from .memory import array, number


@kernel
def double(first, last, address, like):
    fours.scale(array(address, first, last - first, like), number(2, like))


@kernel
def clear(first, last, address, like):
    fours.fill(array(address, first, last - first, like), number(0, like))
"""
#: Doubles some numbers of each dtype, or clears them; prints what was loaded, and logs to stdout.
PROGRAM = """
import logging, os, resource, signal, sys
mode, *calls = sys.argv[1:]
level = logging.DEBUG if "debug" in mode else logging.INFO
logging.basicConfig(stream=sys.stdout, level=level, format="%(levelname)s %(message)s")
if mode == "numba's debug":
    logging.getLogger("numba").setLevel(logging.DEBUG)
if mode == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
elif mode.startswith("killed"):
    replaced, replace = [], os.replace
    def replace_until(source, target):
        if len(replaced) == int(mode.split()[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        replaced.append(replace(source, target))
    os.replace = replace_until
import numpy as np
from common.ops.shared.cpu import toy
for call in calls:
    name, dtype = call.split()
    kernel, x = getattr(toy, name), np.arange(8).astype(dtype)
    kernel(2, 6, x.ctypes.data, x.dtype.type(0))
    expected = np.arange(8) * np.where((np.arange(8) > 1) & (np.arange(8) < 6), {"double": 2, "clear": 0}[name], 1)
    assert (x == expected).all(), (call, x)
print("loaded", sum(sum(kernel.stats.cache_hits.values()) for kernel in (toy.double, toy.clear)))
"""
SINGLE, DOUBLE, CLEAR = "double float32", "double float64", "clear float32"


class Package:
    """A copy of the package in a folder, whose programs run in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.files = folder / "package" / "common" / "ops" / "shared" / "cpu"
        self.files.mkdir(parents=True)
        for name in ("__init__.py", "compiler.py", "memory.py", "vectors.py", "fours.py"):
            shutil.copy(CHECKOUT / "common" / "ops" / "shared" / "cpu" / name, self.files)
        for parent in list(self.files.parents)[:3]:
            (parent / "__init__.py").touch()
        (self.files / "toy.py").write_text(KERNELS)
        self.home = folder / "home"
        self.home.mkdir()
        unwanted = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH")
        self.environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.environment |= {"HOME": str(self.home), "PYTHONPATH": ""}

    def start(self, *calls: str, mode: str = "") -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, mode, *calls]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=self.environment, cwd=self.files.parents[3], **streams)

    def run(self, *calls: str, mode: str = "", killed: bool = False) -> list[str]:
        return ended(self.start(*calls, mode=mode), killed)

    def make_unwritable(self) -> None:
        """A file stands where the folder would be, which stops root as well."""
        (self.files / "__pycache__").touch()

    def make_home_unwritable(self) -> None:
        (self.home / ".cache").touch()

    def stored(self, pattern: str) -> list[Path]:
        return sorted(path for path in self.files.parents[4].rglob(pattern))


def ended(process: subprocess.Popen, killed: bool = False) -> list[str]:
    """The lines that a process prints."""
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == (-signal.SIGKILL if killed else 0), printed
    return printed.splitlines()


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Package]:
    return Package(tmp_path)


def compiles(lines: list[str]) -> bool:
    """Whether the log says, once, that kernels are compiled; it may not say anything else."""
    said = [line for line in lines if line.startswith("INFO")]
    assert len(said) <= 1 and all("LINEARTIME_CPU_KERNELS=0" in line for line in said)
    assert len(said) == len(lines) - 1, lines
    return bool(said)


def test_code_is_compiled_once_and_again_when_a_file_changes(package):
    """The log says so once, with steps of Numba's compiler only if Numba's own level asks for them."""
    first = package.run(SINGLE, DOUBLE, CLEAR, mode="debug")  # fairseq's models log everything
    assert compiles(first) and first[-1] == "loaded 0"
    second = package.run(SINGLE, DOUBLE, CLEAR)
    assert not compiles(second) and second[-1] == "loaded 3"
    names = {path.name for path in package.stored("*.nbi")}
    file = package.files / "fours.py"  # Numba itself notices only changes of the kernel's own file
    file.write_text(file.read_text().replace("x[i] *= factor", "x[i] *= factor + factor - factor"))
    lines = package.run(SINGLE, CLEAR, mode="numba's debug")
    assert lines[-1] == "loaded 0" and any(line.startswith("DEBUG") for line in lines)
    assert len(names) == 2 and len(package.stored("*.nbi")) == 4


def test_folders_that_are_not_writable(package):
    """Code is stored in the home folder; where that is not writable either, each process compiles."""
    package.make_unwritable()
    assert compiles(package.run(SINGLE))
    assert all(path.is_relative_to(package.home) for path in package.stored("*.nb?"))
    assert package.run(SINGLE) == ["loaded 1"]
    shutil.rmtree(package.home)
    package.home.mkdir()
    package.make_home_unwritable()
    assert compiles(package.run(SINGLE)) and not package.stored("*.nb?")


@pytest.mark.parametrize("mode", ["full disk", "killed 0", "killed 1"])
def test_what_ends_while_it_stores_leaves_a_usable_cache(mode, package):
    """A full disk is a warning; a process is killed before an index is stored, or between it and the code."""
    lines = package.run(SINGLE, mode=mode, killed=mode != "full disk")
    if mode == "full disk":
        assert any(line.startswith("WARNING") and str(package.files) in line for line in lines)
    assert compiles(package.run(SINGLE))
    assert package.run(SINGLE) == ["loaded 1"]


def test_processes_that_compile_at_the_same_time(package):
    for process in [package.start(SINGLE, DOUBLE), package.start(DOUBLE, SINGLE)]:
        ended(process)
    package.run(SINGLE, DOUBLE)  # one may have taken the name of the other's file
    assert package.run(SINGLE, DOUBLE) == ["loaded 2"]


def test_damaged_files_are_a_warning_and_code_for_another_type_is_not_called(package):
    """Numba would call it: its index names files without a check, and two processes can write one name."""
    package.run(SINGLE, DOUBLE, CLEAR)
    (index,), (code, other) = package.stored("*clear*.nbi"), package.stored("*double*.nbc")
    index.write_bytes(index.read_bytes()[:30])
    shutil.copy(other, code)
    lines = package.run(SINGLE, DOUBLE, CLEAR)
    assert [line.split()[0] for line in lines].count("WARNING") == 1 and lines[-1] != "loaded 3"
    (path, _) = package.stored("*double*.nbc")
    path.write_bytes(path.read_bytes()[:30])
    lines = package.run(SINGLE, DOUBLE, CLEAR)
    assert [line.split()[0] for line in lines].count("WARNING") == 1 and lines[-1] != "loaded 3"
    assert package.run(SINGLE, DOUBLE, CLEAR) == ["loaded 3"]
