"""A command that reads results, prints tables of them, and writes the tables on request."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .scripts import command_line
from .tables import Table, as_markdown, as_text, check_document, describe_run, write_document


def summarise(
    command: str, arguments: Iterable[str] | None, out: Path | None, tables: Callable[[], Sequence[Table]]
) -> None:
    """Print ``tables()``, and write them as Markdown to ``out``, the option ``--out`` of ``command``, unless None.

    ``arguments`` are those of the command line; None: those of this process.

    Raises:
        ValueError: ``out`` exists and ``command`` did not write it; raised before ``tables`` is called.
    """
    started = time.monotonic()
    if out is not None:
        check_document(out, command, "--out")
    blocks = tables()
    run = describe_run(command_line(command, arguments), time.monotonic() - started)
    print(as_text(blocks, run))
    if out is not None:
        write_document(out, as_markdown(blocks, run) + "\n", command)
