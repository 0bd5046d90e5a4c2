"""A command that reads results, prints tables of them, and writes these where it is asked to."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .scripts import command_line
from .tables import Table, as_markdown, as_text, check_document, describe_run, write_document


def summarise(
    command: str, arguments: Iterable[str] | None, out: Path | None, tables: Callable[[], Sequence[Table]]
) -> None:
    """Print ``tables()``, and write them to ``out``, the option ``--out`` of ``command``, as Markdown if it is given.

    ``arguments`` are what was typed after ``command``; None for those of the process.

    Raises:
        ValueError: at ``out`` is something that ``command`` did not write; before ``tables`` is called.
    """
    started = time.monotonic()
    if out is not None:
        check_document(out, command, "--out")
    made = tables()
    run = describe_run(command_line(command, arguments), time.monotonic() - started)
    print(as_text(made, run))
    if out is not None:
        write_document(out, as_markdown(made, run) + "\n", command)
