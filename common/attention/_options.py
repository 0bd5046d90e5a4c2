"""Declaration of a mechanism's options, fields of a frozen dataclass that checks them, and of facts for people.

Both hosts derive their command lines and keyword arguments from these fields.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from ..ops.shared.checks import ArgumentError, allowed_names, check_choice, shortened


class About(NamedTuple):
    """The name of a mechanism in prose, its paper, and its cost; ``make tables`` writes them into the READMEs.

    The first line of the class's docstring says what the mechanism computes.

    In formulas n is the number of tokens, d the channels of a head, and ``a b`` a product; ``sizes`` maps the other
    letters to options.
    """

    title: str
    paper: str
    #: Multiplications of one head, up to a constant factor.
    cost: str
    #: Size of one head's decoding state after n tokens, in numbers, up to a few; empty if it cannot decode.
    state: str = ""
    #: Options by their letter in ``cost`` and ``state``.
    sizes: Mapping[str, str] = MappingProxyType({})
    #: The map that ``record_attention(model, maps=True)`` records, if it is not simply the weights of the values.
    map: str = ""
    #: Where the paper is read; empty for mechanisms of our own.
    url: str = ""


class Option(NamedTuple):
    """Description of one option: everything except its name and default."""

    help: str  # one sentence for the help of a command line
    type: type  # the type that a command line reads: str, int, float or bool
    choices: tuple[str, ...] | None  # the allowed values where they are names
    parse: Callable[[str, Any], Any]  # (name, value) -> the stored value; ValueError if it is not allowed
    speed_only: bool  # True if the option changes speed and memory, but never the result
    setup_only: bool  # True if only the module's ``setup`` reads the option, and its op has no such argument


def option(
    default: Any,
    help: str,
    type: type,
    parse: Callable[[str, Any], Any],
    choices: Sequence[str] | None = None,
    speed_only: bool = False,
    setup_only: bool = False,
) -> Any:
    """A field of an options dataclass; see ``Option``. The functions below build the common kinds."""
    description = Option(help, type, None if choices is None else tuple(choices), parse, speed_only, setup_only)
    return field(default=default, metadata={"option": description})


def default_of(op: Callable, name: str) -> Any:
    """The default of the argument ``name`` of ``op``, so that defaults are written only in ``common.ops``."""
    return inspect.signature(op).parameters[name].default


def choice(default: str, choices: Sequence[str], help: str, setup_only: bool = False, speed_only: bool = False) -> Any:
    """A field that holds one of the names in ``choices``."""

    def parse(name: str, value: Any) -> str:
        check_choice(name, value, choices)
        return value

    return option(default, help, str, parse, choices, speed_only, setup_only)


def count(
    default: int | None,
    help: str,
    optional: bool = False,
    speed_only: bool = False,
    setup_only: bool = False,
    most: int | None = None,
    odd: bool = False,
) -> Any:
    """A field that holds an integer from 1 to ``most``; with ``optional`` also None, which is 0 on a command line."""

    def parse(name: str, value: Any) -> int | None:
        if optional and (value is None or (value == 0 and not isinstance(value, bool))):
            return None
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count or (most is not None and value > most) or (odd and value % 2 == 0):
            integers = f"an {'odd ' if odd else ''}integer {'of at least 1' if most is None else f'from 1 to {most}'}"
            allowed = f"{integers}{', or None' if optional else ''}"
            raise ArgumentError(f"`{name}` is {shortened(value)}; allowed: {allowed}")
        return value

    return option(default, help, int, parse, speed_only=speed_only, setup_only=setup_only)


def causal_chunk_size(op: Callable) -> Any:
    """The field ``chunk_size`` of a mechanism whose ``op`` processes a causal sequence chunk by chunk."""
    help = "tokens computed at once by the causal form: speed and memory, never the result"
    return count(default_of(op, "chunk_size"), help, speed_only=True)


def number(
    default: float | None, help: str, optional: bool = False, setup_only: bool = False, below: float = math.inf
) -> Any:
    """A field that holds a number above 0 and below ``below``; strings are converted.

    With ``optional`` also "inf" and None.
    """

    def parse(name: str, value: Any) -> float | None:
        try:
            converted = float(value) if isinstance(value, str) else value
        except ValueError:
            converted = math.nan
        is_number = isinstance(converted, (int, float)) and not isinstance(converted, bool) and converted > 0.0
        if not (is_number and (optional or converted < below) or (optional and converted is None)):
            limit = "" if below == math.inf else f" and below {below:g}"
            allowed = f"a number above 0{limit}{', inf, or None' if optional else ''}"
            raise ArgumentError(f"`{name}` is {shortened(value)}; allowed: {allowed}")
        return converted

    return option(default, help, float, parse, setup_only=setup_only)


def flag(default: bool, help: str, setup_only: bool = False) -> Any:
    """A field that holds True or False."""

    def parse(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ArgumentError(f"`{name}` is {shortened(value)}; allowed: True or False")
        return value

    return option(default, help, bool, parse, setup_only=setup_only)


@dataclass(frozen=True)
class AttentionOptions:
    """The options of one mechanism. A subclass has one field per option, built by one of the functions above.

    Raises:
        ValueError: a value that its option does not allow.
    """

    def __post_init__(self) -> None:
        for name, description in self.described().items():
            object.__setattr__(self, name, description.parse(name, getattr(self, name)))

    @classmethod
    def described(cls) -> dict[str, Option]:
        """Each option's name and description, in the order of declaration."""
        return {x.name: x.metadata["option"] for x in fields(cls)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Each option's name and default."""
        return {x.name: x.default for x in fields(cls) if x.default is not MISSING}

    @classmethod
    def read(cls, attention: str, options: Mapping[str, Any]) -> "AttentionOptions":
        """The options of the mechanism called ``attention`` from keyword arguments; ValueError for an unknown one."""
        names = cls.described()
        for name in options:
            if name not in names:
                raise ValueError(
                    f"attention {attention!r} has no option {shortened(name)}; {allowed_names(name, names)}"
                )
        return cls(**options)

    def as_dict(self) -> dict[str, Any]:
        """Names and values, in the order of declaration."""
        return {x.name: getattr(self, x.name) for x in fields(self)}
