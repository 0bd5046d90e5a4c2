"""Stored machine code of kernels: unwritable, full, damaged, shared by processes, and of changed source files.

Each test has a copy of the files of ``common.ops.shared.cpu`` that need no torch, with a small kernel. Processes are
forks of this one, which has imported Numba: that takes most of the time of a new one.
"""

import gc
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
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
SINGLE, DOUBLE, CLEAR = "double float32", "double float64", "clear float32"


def run(mode: str, calls: tuple[str, ...], package: "Package", printed: int) -> None:
    """In a new process: doubles some numbers of each dtype, or clears them, and says what was loaded."""
    gc.disable()  # a collection would copy all memory of this process
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(package.files.parents[3])
    os.environ["HOME"] = str(package.home)
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]
    sys.path.insert(0, os.getcwd())
    level = logging.DEBUG if "debug" in mode else logging.INFO
    stream = open(1, "w", closefd=False)
    logging.basicConfig(stream=stream, level=level, format="%(levelname)s %(message)s", force=True)
    logging.getLogger("numba").setLevel(logging.DEBUG if mode == "numba's debug" else logging.NOTSET)
    if mode == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    elif mode.startswith("killed"):
        replaced, replace = [], os.replace

        def replace_until(source, target):
            if len(replaced) == int(mode.split()[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            replaced.append(replace(source, target))

        os.replace = replace_until
    toy = import_module("common.ops.shared.cpu.toy")
    for call in calls:
        name, dtype = call.split()
        kernel, x = getattr(toy, name), np.arange(8).astype(dtype)
        kernel(2, 6, x.ctypes.data, x.dtype.type(0))
        changed = (np.arange(8) > 1) & (np.arange(8) < 6)
        assert (x == np.arange(8) * np.where(changed, {"double": 2, "clear": 0}[name], 1)).all(), (call, x)
    loaded = sum(sum(kernel.stats.cache_hits.values()) for kernel in (toy.double, toy.clear))
    print("loaded", loaded, file=stream, flush=True)


class Package:
    """A copy of the package in a folder, whose kernels run in processes of their own."""

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

    def start(self, *calls: str, mode: str = ""):
        """A function that waits for the end of a new process and returns the lines that it printed."""
        reading, writing = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=run, args=(mode, calls, self, writing))
        process.start()
        os.close(writing)

        def wait() -> list[str]:
            with open(reading) as pipe:
                printed = pipe.read()
            process.join(LIMIT)
            assert process.exitcode == (-signal.SIGKILL if mode.startswith("killed") else 0), printed
            return printed.splitlines()

        return wait

    def run(self, *calls: str, mode: str = "") -> list[str]:
        return self.start(*calls, mode=mode)()

    def stored(self, pattern: str) -> list[Path]:
        return sorted(path for path in self.files.parents[4].rglob(pattern))


@pytest.fixture
def package(tmp_path: Path) -> Package:
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
    (package.files / "__pycache__").touch()  # a file in the place of the folder stops root as well
    assert compiles(package.run(SINGLE))
    assert all(path.is_relative_to(package.home) for path in package.stored("*.nb?"))
    assert package.run(SINGLE) == ["loaded 1"]
    shutil.rmtree(package.home)
    package.home.mkdir()
    (package.home / ".cache").touch()
    assert compiles(package.run(SINGLE)) and not package.stored("*.nb?")


def test_what_ends_while_it_stores_leaves_a_usable_cache(package):
    """A full disk is a warning; processes are killed before an index is stored, and between it and the code."""
    lines = package.run(SINGLE, mode="full disk")
    assert any(line.startswith("WARNING") and str(package.files) in line for line in lines)
    for mode in ("killed 0", "killed 1"):
        package.run(SINGLE, mode=mode)
    assert compiles(package.run(SINGLE))
    assert package.run(SINGLE) == ["loaded 1"]


def test_processes_that_compile_at_the_same_time(package):
    for wait in [package.start(SINGLE, DOUBLE), package.start(DOUBLE, SINGLE)]:
        wait()
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
