"""Running a host's own command line: shown so that it can be copied, logged, watched, and its memory measured."""

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

#: The checkout: every command runs there, so that ``--user-dir fairseq_plugin`` and ``import timm_plugin`` work.
ROOT = Path(__file__).resolve().parents[1]

#: How often a process' memory is read. Peaks shorter than this can be missed; training repeats its own.
_SAMPLE_SECONDS = 0.1
_TAIL_LINES = 25


class CommandFailed(RuntimeError):
    """A command ended with an error; the message has the command, the end of its log and the log's path."""


class Finished(NamedTuple):
    """What a command that succeeded cost."""

    seconds: float
    peak_bytes: int  # largest resident memory of the process and its children seen while it ran


def shown(path: Path) -> str:
    """``path`` as in a command: relative to the checkout where it lies inside."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def python(*arguments: object) -> list[str]:
    """A command of the interpreter that runs the demo."""
    return [shown(Path(sys.executable)), *(shown(a) if isinstance(a, Path) else str(a) for a in arguments)]


def run(command: list[str], log: Path, on_line: Callable[[str], None] | None = None) -> Finished:
    """Print and run ``command`` in the checkout, its output going to ``log`` and line by line to ``on_line``.

    Raises:
        CommandFailed: it could not be started or ended with an error.
    """
    text = shlex.join(command)
    print(f"  $ {text}", flush=True)
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        file.write(f"$ {text}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, encoding="utf-8", errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise CommandFailed(f"{text}\ncould not be started: {error}") from error
        memory = _PeakMemory(process.pid)
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if on_line is not None:
                    on_line(line)
            code = process.wait()
        finally:
            # Reached with a live process when on_line raises or the user presses Ctrl-C.
            if process.poll() is None:
                process.kill()
                process.wait()
            peak = memory.stop()
    if code != 0:
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[1:][-_TAIL_LINES:])
        raise CommandFailed(f"{text}\nended with exit status {code}. The end of its log, {shown(log)}:\n{tail}")
    return Finished(time.monotonic() - started, peak)


class _PeakMemory(threading.Thread):
    """Largest resident memory of a process and its children. Rusage would do, were it not inherited across fork."""

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
        except psutil.Error:  # it has just ended
            pass

    def stop(self) -> int:
        """The peak so far in bytes; ends the watching."""
        self._ended.set()
        self.join()
        return self._peak
