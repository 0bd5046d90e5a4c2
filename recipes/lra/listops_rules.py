"""ListOps, reimplemented by the rules of the Long Range Arena's generator (Nangia and Bowman, 2018; Tay et al., 2021).

An expression is a digit, or an operator with 2 to 10 expressions as arguments: ``[MAX 2 9 [MIN 4 7 ] 0 ]``. Its value
is a digit. Trees have at most ten levels; a node above the last level is an operator with probability 1/4.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
DIGITS = tuple("0123456789")
SYMBOLS = (*DIGITS, *OPERATORS, END)

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
OPERATOR_PROBABILITY = 0.25
#: Trees drawn for one expression before giving up; with the default lengths one in twelve is accepted.
_TRIES = 1_000_000


class Expression(NamedTuple):
    """The symbols of an expression, in order, and its value."""

    symbols: tuple[str, ...]
    value: int


class _TooLong(Exception):
    """A tree already has too many symbols, so that it would be rejected."""


def draw(rng: random.Random, min_length: int, max_length: int) -> Expression:
    """Draw trees until one has more than ``min_length`` and fewer than ``max_length`` symbols.

    Raises:
        ValueError: no such tree among a million.
    """
    for _ in range(_TRIES):
        symbols: list[str] = []
        try:
            value = _tree(rng, 1, symbols, max_length)
        except _TooLong:
            continue
        if min_length < len(symbols) < max_length:
            return Expression(tuple(symbols), value)
    raise ValueError(
        f"none of {_TRIES:,} expressions has more than {min_length} and fewer than {max_length} symbols, as "
        "--min-length and --max-length ask for; allowed: lengths that are not so rare"
    )


def _tree(rng: random.Random, depth: int, symbols: list[str], limit: int) -> int:
    """Append the symbols of a random tree at level ``depth`` to ``symbols``; returns its value."""
    if depth >= MAX_DEPTH or rng.random() > OPERATOR_PROBABILITY:
        value = rng.randrange(10)
        symbols.append(DIGITS[value])
        return value
    count = rng.randint(2, MAX_ARGUMENTS)
    operator_index = len(symbols)
    symbols.append("")  # the operator, which is drawn after its arguments
    arguments = []
    for _ in range(count):
        arguments.append(_tree(rng, depth + 1, symbols, limit))
        if len(symbols) >= limit:
            raise _TooLong
    symbols[operator_index] = OPERATORS[rng.randrange(len(OPERATORS))]
    symbols.append(END)
    return apply(symbols[operator_index], arguments)


def apply(operator: str, arguments: Sequence[int]) -> int:
    """Apply an operator: minimum, maximum, median rounded down, or sum modulo 10."""
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered = sorted(arguments)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def evaluate(symbols: Sequence[str]) -> int:
    """The value of an expression.

    Raises:
        ValueError: a symbol is unknown, or the symbols are not an expression.
    """
    open_operators: list[tuple[str, list[int]]] = [("", [])]
    for symbol in symbols:
        if symbol in OPERATORS:
            open_operators.append((symbol, []))
        elif symbol == END and len(open_operators) > 1 and open_operators[-1][1]:
            operator, arguments = open_operators.pop()
            open_operators[-1][1].append(apply(operator, arguments))
        elif symbol in DIGITS:
            open_operators[-1][1].append(int(symbol))
        else:
            raise ValueError(f"{symbol!r} in an expression; allowed there: one of {' '.join(SYMBOLS)} in its place")
    if len(open_operators) != 1 or len(open_operators[0][1]) != 1:
        raise ValueError(f"{len(symbols)} symbols that are no expression; allowed: one whose brackets are all closed")
    return open_operators[0][1][0]
