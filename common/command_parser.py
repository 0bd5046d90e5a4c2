"""The parser of all our commands: argparse's, without abbreviations, and with negative numbers as values."""

import argparse
import re
from typing import Any


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
