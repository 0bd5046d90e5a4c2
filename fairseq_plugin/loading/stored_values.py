"""The values in a checkpoint's configuration, at any depth, before fairseq reads them.

A value is what has no parts: a number, a text, None. Containers are opened one level at a time, and values are
counted on the way, since containers that share parts are small in a file and could fill all memory if they were copied.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from omegaconf import Node, OmegaConf

from common.ops.shared.checks import shortened

from .configuration_errors import configuration_errors

#: An interpolation that refers to another option of the same configuration.
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
#: The most values in a configuration, after references are replaced; fairseq's own have about a thousand.
_MOST_VALUES = 20_000


def stored_options(state: Mapping[str, Any], path: str, leave_out: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Names and values of all options of the checkpoint ``state``, with references replaced; O(number of values).

    A value in a list or group has the name of the nearest key. ``leave_out`` are groups to skip in a nested
    configuration, and ``path`` is for messages.

    Raises:
        ValueError: an interpolation that does not refer to another option, such as one of an environment variable; too
            many values; or a malformed configuration.
    """
    arguments, config = state.get("args"), state.get("cfg")
    if arguments is not None:
        yield from _without_interpolations(arguments, path)
    if config is not None:
        _check_references(config, path)
        groups = {name: group for name, group in _resolved(config, path).items() if name not in leave_out}
        yield from _without_interpolations(groups, path)


def _check_references(config: Any, path: str) -> None:
    """ValueError for an interpolation in ``config`` that is no reference to a value or to a few plain values."""
    values = _values(config, path)
    count = len(values)
    for name, value in values:
        if not _is_interpolation(value):
            continue
        reference = _REFERENCE.fullmatch(str(value))
        named = [] if reference is None else _values(_at(config, reference[1].split(".")), path)
        # References to containers with references could fill all memory, too.
        if reference is None or (len(named) > 1 and any(_is_interpolation(x) for _, x in named)):
            raise ValueError(
                f"the checkpoint {path!r} has {name} = {shortened(value)}; allowed: the name of another option"
            )
        count += len(named)
        _check_count(count, path)


def _at(config: Any, names: Iterable[str]) -> Any:
    """The value in ``config`` below the keys ``names``, outermost first; None if there is none."""
    for name in names:
        content = _content(config)
        config = content.get(name) if isinstance(content, Mapping) else None
    return config


def _resolved(config: Any, path: str) -> dict[str, Any]:
    """A nested configuration as plain values."""
    with configuration_errors(path):
        groups = OmegaConf.to_container(OmegaConf.create(config, flags={"allow_objects": True}), resolve=True)
        if not isinstance(groups, dict):
            raise TypeError(f"a {type(groups).__name__}")
        return groups


def _without_interpolations(options: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values of ``options``; ValueError for an interpolation, which another configuration would resolve."""
    for name, value in _values(options, path):
        if _is_interpolation(value):
            raise ValueError(f"the checkpoint {path!r} has {name} = {shortened(value)}; allowed: no interpolation")
        yield name, value


def _is_interpolation(value: Any) -> bool:
    return not isinstance(value, int) and "${" in str(value)  # Python does not print integers of thousands of digits


def _values(options: Any, path: str) -> list[tuple[str, Any]]:
    """All values in nested containers, each with the name of its nearest key; nothing is resolved."""
    with configuration_errors(path):
        values = list(islice(_walk("cfg", options), _MOST_VALUES + 1))
    _check_count(len(values), path)
    return values


def _check_count(count: int, path: str) -> None:
    if count > _MOST_VALUES:
        raise ValueError(
            f"the checkpoint {path!r} has a configuration of too many values; allowed: at most {_MOST_VALUES:,}"
        )


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    content, is_empty = _content(value), True
    for key, item in _parts(name, content):
        is_empty = False
        yield from _walk(key, item)
    if is_empty:  # an empty container counts as a value, since their number is limited, too
        yield name, content


def _parts(name: str, content: Any) -> Iterable[tuple[str, Any]]:
    """The parts of a container and their names; none for a plain value."""
    if isinstance(content, Mapping):
        return ((str(key), item) for key, item in content.items())
    items = content.flat if isinstance(content, np.ndarray) else content
    return ((name, item) for item in items) if isinstance(content, (list, tuple, set, frozenset, np.ndarray)) else ()


def _content(value: Any) -> Any:
    """The content of one of omegaconf's nodes or of a namespace, one level of it; any other ``value`` itself."""
    if isinstance(value, Node):
        return _content(value._value())
    return vars(value) if isinstance(value, Namespace) else value
