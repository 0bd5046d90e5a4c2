"""The parser of every command of ours: argparse's, with no abbreviations, and with negative numbers as values."""

import argparse
import re
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Parser of a command line in which an option is typed by its whole name, and a value may begin with a minus.

    argparse takes a word that begins with a minus for an option unless it is a plain number. Here the numbers that
    Python reads and lists of them are values, too: ``--lr -1e-3``, ``--targets -200,-800``. No option of a command
    begins with a minus and a digit.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)
        # argparse has no other way to say which words are numbers; tests/test_commands.py looks whether it still asks.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf\b|nan\b)", re.IGNORECASE)
