"""Run a command line of a host: print it so that it can be copied, log its output, and measure its memory."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from tqdm import tqdm

from common.files.output_files import errors_name_path

from .scripts import RecipeFailed
from .working_folder import register

#: The checkout: every command runs there, so that ``--user-dir fairseq_plugin`` and ``import timm_plugin`` work.
ROOT = Path(__file__).resolve().parents[2]

#: Seconds between two samples of a process's memory. Shorter peaks can be missed, but training repeats its peaks.
_SAMPLE_SECONDS = 0.1
_TAIL_LINES = 25


class CommandFailed(RecipeFailed):
    """A command ended with an error; the message has the command, the end of its log and the log's path."""


class Finished(NamedTuple):
    """The cost of a command that succeeded."""

    seconds: float
    peak_bytes: int  # largest resident memory of the process and its children seen while it ran


def shown_path(path: Path) -> str:
    """``path`` as a user would type it: relative to the checkout if it lies inside."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def python_command(*arguments: object) -> list[str]:
    """A command line for the Python interpreter of this process."""
    return [
        shown_path(Path(sys.executable)),
        *(shown_path(a) if isinstance(a, Path) else str(a) for a in arguments),
    ]


def run(
    command: list[str],
    log: Path,
    on_line: Callable[[str], None] | None = None,
    append: bool = False,
    threads: int | None = None,
) -> Finished:
    """Print and run ``command`` in the checkout; its output goes to ``log``, and line by line to ``on_line``.

    Args:
        append: append to ``log`` instead of replacing it.
        threads: number of threads of torch in the command; None: torch's default.

    Raises:
        CommandFailed: it could not be started or ended with an error.
        ValueError: ``log`` exists, and this command did not write it.
    """
    shown_command = shlex.join(command)
    with tqdm.external_write_mode():  # above the progress bars, if there are any
        print(f"  $ {shown_command}", flush=True)
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    started = time.monotonic()
    register(log).parent.mkdir(parents=True, exist_ok=True)
    with errors_name_path(log), open(log, "a" if append else "w", encoding="utf-8") as file:
        file.write(f"$ {shown_command}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                text=True,
                encoding="utf-8",
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                close_fds=False,  # the folder stays locked until the command ends, even if this process ends earlier
            )
        except OSError as error:
            raise CommandFailed(f"{shown_command}\ncould not be started: {error}") from error
        memory = _PeakMemory(process.pid)
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if on_line is not None:
                    on_line(line)
            code = process.wait()
        finally:
            # The process is still alive if on_line raised or the user pressed Ctrl-C.
            if process.poll() is None:
                process.kill()
                process.wait()
            peak = memory.stop()
    if code != 0:
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[1:][-_TAIL_LINES:])
        raise CommandFailed(
            f"{shown_command}\nended with exit status {code}. The end of its log, {shown_path(log)}:\n{tail}"
        )
    return Finished(time.monotonic() - started, peak)


class _PeakMemory(threading.Thread):
    """The largest resident memory of a process and its children.

    ``resource.getrusage`` cannot be used: its maximum is inherited when a process forks.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._peak = 0
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            process = psutil.Process(self._pid)
            while not self._ended.wait(_SAMPLE_SECONDS):
                family = [process, *process.children(recursive=True)]
                self._peak = max(self._peak, sum(member.memory_info().rss for member in family))
        except psutil.Error:  # the process has just ended
            pass

    def stop(self) -> int:
        """Stop watching; returns the peak in bytes."""
        self._ended.set()
        self.join()
        return self._peak
