"""JSON files that may be damaged: errors are one line, and values are checked against the types a reader expects.

Files that this project writes hold the SHA-256 of their content, ``CHECKSUM``. To edit such a file, remove that line.
"""

import dataclasses
import hashlib
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..ops.shared.checks import shortened

#: The key of the digest in an object.
CHECKSUM = "sha256"
#: Maximum number of digits of an integer: enough for the 1e30 that Hugging Face's tokenizers write for no limit.
_DIGITS = 31
_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
_WORDS |= {list: "a list", dict: "an object", Path: "a text"}


def parse(text: str) -> Any:
    """Parse the JSON ``text``; NaN and Infinity, which Python writes, are numbers.

    Raises:
        ValueError: ``text`` is not JSON, an object has a key twice, or a number is too large.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("lists or objects in one another, too many") from None


def check_file(path: Path, allowed: str) -> None:
    """Raise ValueError if ``path`` exists and is not a regular file: reading a pipe would wait for a writer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; allowed: {allowed}")


def read(path: Path, allowed: str) -> Any:
    """The content of a file, without an object's checksum. Error messages end with ``allowed``.

    Raises:
        ValueError: the file is missing, cannot be read, is not JSON, or does not match its checksum.
    """
    check_file(path, allowed)
    try:
        return checked(parse(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path} cannot be read: {reason}; allowed: {allowed}") from error


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with its checksum as the last entry."""
    return {**content, CHECKSUM: _digest(content)}


def checked(content: Any) -> Any:
    """Check ``content`` against its checksum, if it has one, and return it without the checksum.

    Raises:
        ValueError: the checksum does not match the content.
    """
    if not isinstance(content, dict) or CHECKSUM not in content:
        return content
    content, stored = {name: value for name, value in content.items() if name != CHECKSUM}, content[CHECKSUM]
    if stored != _digest(content):
        raise ValueError(
            f"it is not as it was written: {CHECKSUM} in it is of another content. Who changed it on purpose takes "
            f"{CHECKSUM} out, and the comma before it"
        )
    return content


def typed(value: Any, kind: Any, where: str) -> Any:
    """Convert ``value``, read from JSON, to the type ``kind``; error messages call it ``where``.

    ``kind`` is None, a plain type, a list, tuple, dictionary or union of these, a NamedTuple or a dataclass. A list is
    converted to a tuple if ``kind`` is one, and an object to a NamedTuple or a dataclass; it may omit fields that have
    a default. A list of all fields is also accepted for a NamedTuple.

    Raises:
        ValueError: ``value`` is of another type.
    """
    if kind is Any:
        return value
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of(value, get_args(kind), where)
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if hasattr(outer, "_fields") or hasattr(outer, "__dataclass_fields__"):
        return _made(value, outer, where)
    if outer in (list, tuple, Sequence):
        return _listed(value, outer, inner, where)
    if outer in (dict, Mapping):
        _check(value, dict, where)
        return {name: typed(item, inner[1], f"{where}.{name:.100}") for name, item in value.items()} if inner else value
    _check(value, outer, where)
    return outer(value) if outer in (float, Path) else value


def _made(value: Any, kind: Callable[..., Any], where: str) -> Any:
    """Build the NamedTuple or dataclass ``kind`` from the fields of the object ``value``."""
    names = getattr(kind, "_fields", None)
    if names is not None and isinstance(value, list) and len(value) == len(names):  # as json.dumps writes a NamedTuple
        value = dict(zip(names, value))
    _check(value, dict, where)
    hints, defaults = get_type_hints(kind), getattr(kind, "_field_defaults", {})
    if names is None:
        names = [field.name for field in dataclasses.fields(kind)]
        defaults = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
    faults = [f"has no {x}" for x in names if x not in value and x not in defaults]
    faults += [f"has the further name {shortened(x)}" for x in value if x not in names]
    if faults:
        raise ValueError(f"{where} {faults[0]}; allowed: {', '.join(names)}")
    return kind(**{name: typed(item, hints[name], f"{where}.{name}") for name, item in value.items()})


def _listed(value: Any, outer: Any, inner: tuple[Any, ...], where: str) -> Any:
    _check(value, list, where)
    if outer is tuple and inner and inner[-1] is not ...:
        if len(value) != len(inner):
            raise ValueError(f"{where} has {len(value)} values; allowed: {len(inner)}")
        kinds = inner
    else:
        kinds = (inner[0] if inner else Any,) * len(value)
    values = [typed(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds))]
    return tuple(values) if outer is tuple else values


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    """``value`` as the first of ``kinds`` that it fits."""
    errors = []
    for kind in kinds:
        try:
            return typed(value, kind, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _check(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError unless ``value`` has the plain type ``kind``; an integer is a number, but true is neither."""
    fits = {float: (int, float), Path: str}.get(kind, kind)
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {shortened(value)}; allowed: {_WORDS.get(kind, kind.__name__)}")


def _digest(content: Mapping[str, Any]) -> str:
    written = json.dumps(json.loads(json.dumps(content)), sort_keys=True)  # JSON converts keys to text
    return hashlib.sha256(written.encode()).hexdigest()


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _DIGITS:
        raise ValueError(f"an integer has {len(digits.lstrip('-')):,} digits; allowed: at most {_DIGITS}")
    return int(digits)


def _number(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise ValueError(f"a number is {digits[:20]}, beyond the largest; allowed: up to 1.8e308")
    return float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shortened(next(name for name in names if names.count(name) > 1))} is there twice")
    return result
