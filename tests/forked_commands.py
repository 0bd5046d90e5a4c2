"""Run commands, such as ``fairseq-train`` in a shell script, without importing torch and fairseq each time.

While ``served`` is open in a test, its words prefix such a command, and the command runs in a copy of a process that
has already imported both; see ``processes.Forked``. This file is also the client program that requests the run.
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
    """The words to put before a command on PATH in a shell, to run it in this way."""
    with tempfile.TemporaryDirectory() as folder, Listener(str(Path(folder, "socket"))) as listener:
        server = Thread(target=_serve, args=(listener,))
        server.start()
        try:
            # Without the environment's packages, Python starts in a hundredth of a second.
            yield shlex.join([sys.executable, "-S", __file__, listener.address])
        finally:
            with Client(listener.address) as connection:
                connection.send(None)
            server.join()


def _serve(listener: Listener) -> None:
    """Run the requested commands, one after another, until None is requested."""
    while True:
        with listener.accept() as connection:
            asked = connection.recv()
            if asked is None:
                return
            connection.send(_result(*asked))


def _result(words: list[str], stdin: str, cwd: str, environment: dict[str, str]) -> tuple[int, str]:
    """The exit status of a command, which may be ``python -m MODULE``, and its output, stderr included."""
    from tests.processes import Command, Forked  # the client does not need it

    module = words[2:] if words[:2] == ["python", "-m"] else None
    program, *arguments = module or [shutil.which(words[0], path=environment["PATH"]), *words[1:]]
    if program is None:
        return 127, f"{words[0]}: command not found\n"
    forked = Forked(Command(program, arguments, stdin), cwd=cwd, environment=environment)
    return forked.wait(), "".join(forked.printed())


def _main(address: str, *words: str) -> int:
    """Request a command and print its output; returns the exit status."""
    with Client(address) as connection:
        connection.send((list(words), sys.stdin.read(), os.getcwd(), dict(os.environ)))
        status, printed = connection.recv()
    print(printed, end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
