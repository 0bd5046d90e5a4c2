"""The frame of a recipe's command line: how it reports errors, and the command as the user typed it."""

import argparse
import functools
import shlex
import sys
from collections.abc import Callable, Iterable


class RecipeFailed(RuntimeError):
    """An error whose message tells the user everything; a traceback would add nothing."""


def script(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator for a ``main`` that returns an exit status.

    A ValueError, a RecipeFailed, or an error of the machine (a full disk, a path that is not writable, too little
    memory) becomes one line on stderr that begins with ``name``, and status 1. Ctrl-C is status 130.
    """

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def reported(arguments: Iterable[str] | None = None) -> int:
            try:
                return main(arguments)
            except (ValueError, RecipeFailed, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            except MemoryError as error:
                print(f"{name}: too little memory: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"\n{name}: interrupted.", file=sys.stderr)
                return 130

        return reported

    return decorate


def command_line(module: str, arguments: Iterable[str] | None) -> str:
    """The command that runs ``module`` with ``arguments``, or with those of this process if None."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)])


def positive_int(text: str) -> int:
    """The type of an option whose value is an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: the value is smaller.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: at least 1")
    return value


def positive_number(text: str) -> float:
    """The type of an option whose value is a number above 0.

    Raises:
        argparse.ArgumentTypeError: the value is not.
    """
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value}; allowed: above 0 and finite")
    return value


def fraction(text: str) -> float:
    """The type of an option whose value is a number from 0 to 1.

    Raises:
        argparse.ArgumentTypeError: the value is not.
    """
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value}; allowed: 0 to 1")
    return value
