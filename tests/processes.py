"""The path of the checkout, and Python programs in separate processes."""

import gc
import importlib
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
#: Seconds after which a process counts as stuck.
LIMIT = 300
#: Modules that forked processes have already imported. torch.optim imports torch._dynamo on first use.
PRELOADED = ["torch", "torch._dynamo", "fairseq", "tests.config_store", "fairseq_plugin"]
PRELOADED += ["tests.common.parallel.comparisons"]


def run_program(arguments: Sequence[str], stdin: str = "", cwd: str = "", environment: Mapping[str, str] = {}) -> str:
    """Run ``python ARGUMENTS`` in a new interpreter and return its output, stderr included; it must succeed.

    ``environment`` is in addition to that of this process.
    """
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=cwd or None,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert finished.returncode == 0, f"{' '.join(arguments)}\n{finished.stdout[-3000:]}"
    return finished.stdout


class Command(NamedTuple):
    """A module or a script with its arguments and its standard input."""

    program: str
    arguments: Sequence[str] = ()
    stdin: str = ""


class Forked:
    """Runs commands one after another in a new process that has already imported torch, fairseq and its plugin.

    Each runs like ``python -m MODULE`` or ``python SCRIPT``. Importing fairseq takes longer than most commands
    take on toy data, so one process imports it and is forked.
    """

    def __init__(self, *commands: Command, cwd: str = "", environment: Mapping[str, str] = os.environ) -> None:
        self.commands = commands
        self._folder = tempfile.TemporaryDirectory()
        command_lines = [[command.program, *map(str, command.arguments)] for command in commands]
        for i, command in enumerate(commands):
            Path(self._folder.name, f"{i}.stdin").write_text(command.stdin)
        arguments = (command_lines, cwd or os.getcwd(), dict(environment), self._folder.name)
        self._process = fork_server().Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def wait(self) -> int:
        """Wait for the end and return the exit status; a stuck process is killed."""
        self._process.join(LIMIT)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return self._process.exitcode

    def printed(self) -> list[str]:
        """Wait for the end; the output of each command that was started, stderr included."""
        self.wait()
        files = [Path(self._folder.name, f"{i}.output") for i in range(len(self.commands))]
        return [file.read_text(errors="replace") for file in files if file.exists()]

    def outputs(self) -> list[str]:
        """Wait for the end, which must succeed; the output of each command, stderr included."""
        outputs = self.printed()
        self._folder.cleanup()
        last = self.commands[max(len(outputs) - 1, 0)]
        assert self.wait() == 0, f"{last.program} {' '.join(last.arguments)}\n{''.join(outputs)[-3000:]}"
        return outputs


def run_in_turn(*commands: Command, cwd: str = "") -> list[str]:
    """The outputs of ``commands``, which must succeed, run one after another in one new process."""
    return Forked(*commands, cwd=cwd).outputs()


def run_of_recipe(command: Sequence[object], log: Path, threads: int = 1) -> float:
    """Take the place of ``recipes.runs.run``: Python's ``-m MODULE ...`` in a fork; ``test_runs.py`` runs real ones."""
    flag, module, *arguments = map(str, command)
    assert flag == "-m"
    forked = Forked(Command(module, arguments))
    with open(log, "a", encoding="utf-8") as file:
        file.writelines(forked.printed())
    if forked.wait():
        raise RuntimeError(f"{log} ends with: {log.read_text(encoding='utf-8').strip().splitlines()[-1]}")
    return 1.0


@cache
def fork_server() -> multiprocessing.context.BaseContext:
    """Starts processes as forks of one that has already imported what most of them need, which takes seconds.

    A test process has only one such process, and whoever starts it decides what it imports. Packages that are not
    installed are left out. A process that is such a fork is forked itself.
    """
    if multiprocessing.parent_process() is not None:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(commands: list[list[str]], cwd: str, environment: dict[str, str], folder: str) -> None:
    """In the new process, do what the interpreter does for each command line."""
    gc.freeze()  # collections would look at everything that was imported, which takes a third of a second
    multiprocessing.set_start_method("fork", force=True)  # the interpreter's own; data loader workers start with it
    os.chdir(cwd)
    _let_user_dir_find_the_plugin(Path(cwd, "fairseq_plugin"))
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    _import_own_mechanisms()
    for i, command in enumerate(commands):
        _redirect(Path(folder, f"{i}.stdin"), os.O_RDONLY, 0)
        _redirect(Path(folder, f"{i}.output"), os.O_WRONLY | os.O_CREAT, 1, 2)
        sys.argv, sys.stdin = command, open(0, closefd=False)
        logging.root.handlers.clear()  # importing fairseq creates them; its commands create their own if there are none
        script = os.path.isfile(command[0])
        if command[0].startswith("recipes."):
            importlib.import_module("recipes.runs").run = run_of_recipe
        sys.path.insert(0, str(Path(command[0]).parent) if script else cwd)
        try:
            if script:
                runpy.run_path(command[0], run_name="__main__")
            else:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        finally:
            end_readers()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # a fork of a thread of a pool cannot end that pool, and the interpreter tries


def _let_user_dir_find_the_plugin(folder: Path) -> None:
    """Let fairseq accept the imported plugin for a ``--user-dir`` that leads to it through a link."""
    plugin = sys.modules.get("fairseq_plugin")
    if plugin is not None and folder.exists() and folder.samefile(plugin.__path__[0]):
        plugin.__path__.append(str(folder))


def _import_own_mechanisms() -> None:
    """Import what a new interpreter would, in which the package reads the environment."""
    if names := os.environ.get("LINEARTIME_MECHANISMS"):
        from common.attention import import_own

        import_own(names)


def end_readers() -> None:
    """End the data loader processes: fairseq leaves them running, and torch would wait five seconds for each."""
    for reader in multiprocessing.active_children():
        reader.terminate()


def _redirect(file: Path, flags: int, *descriptors: int) -> None:
    opened = os.open(file, flags)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)
