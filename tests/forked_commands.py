"""Commands of programs, such as ``fairseq-train`` in a shell script, that need not import torch and fairseq first.

While ``served`` is open in a test, what it gives stands before such a command, and the command runs in a copy of a
process that has imported both already; see ``processes.Forked``. This file is also the program that asks for it.
"""

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread


@contextmanager
def served() -> Iterator[str]:
    """The words, as a shell reads them, that stand before a command on PATH to run it so."""
    with tempfile.TemporaryDirectory() as folder, Listener(str(Path(folder, "socket"))) as listener:
        server = Thread(target=_serve, args=(listener,))
        server.start()
        try:
            # Without the packages of the environment, a Python starts in a hundredth of a second.
            yield shlex.join([sys.executable, "-S", __file__, listener.address])
        finally:
            with Client(listener.address) as connection:
                connection.send(None)
            server.join()


def _serve(listener: Listener) -> None:
    """Run what is asked for, one command after another, until None is asked for."""
    while True:
        with listener.accept() as connection:
            asked = connection.recv()
            if asked is None:
                return
            connection.send(_result(*asked))


def _result(words: list[str], stdin: str, cwd: str, environment: dict[str, str]) -> tuple[int, str]:
    """The exit status of a command and what it printed, stderr included."""
    from tests.processes import Command, Forked  # the program that asks has no use for it

    program = shutil.which(words[0], path=environment["PATH"])
    if program is None:
        return 127, f"{words[0]}: command not found\n"
    forked = Forked(Command(program, words[1:], stdin), cwd=cwd, environment=environment)
    return forked.wait(), "".join(forked.printed())


def _main(address: str, *words: str) -> int:
    """Have a command run, and print what it printed; the exit status."""
    with Client(address) as connection:
        connection.send((list(words), sys.stdin.read(), os.getcwd(), dict(os.environ)))
        status, printed = connection.recv()
    print(printed, end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
