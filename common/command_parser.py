"""The parser of all our commands: argparse's, without abbreviations, with negative values and one-line errors."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .argument_error import ArgumentError


class CommandParser(argparse.ArgumentParser):
    """Parser of a command line in which options must be typed in full, and values may begin with a minus.

    argparse treats a word that begins with a minus as an option unless it is a plain number. Here all numbers that
    Python can parse, and lists of them, are values: ``--lr -1e-3``, ``--targets -200,-800``. No option of our commands
    begins with a minus and a digit.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)
        # argparse has no public way to define which words are numbers; tests/test_commands.py checks that this works.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf\b|nan\b)", re.IGNORECASE)

    @contextmanager
    def one_line_errors(self, *further: type[Exception], names: Mapping[str, str] | None = None) -> Iterator[None]:
        """Exit with one line if the block raises ValueError, OSError or one of ``further``.

        ``names`` are the options for the arguments of an ``ArgumentError``, as {"heads": "--attention-heads"}.
        """
        try:
            yield
        except ArgumentError as error:
            raise SystemExit(f"{self.prog}: {error.with_names(names or {})}") from error
        except (ValueError, OSError, *further) as error:
            raise SystemExit(f"{self.prog}: {error}") from error
