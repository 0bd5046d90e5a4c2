"""Stacks whose layers have several kinds of attention: a pattern such as "flow*3,softmax", which repeats."""

import re
from collections.abc import Sequence

from ..ops.shared.checks import ArgumentError

_ITEM = re.compile(r"(?P<name>\w+)(\*(?P<count>[1-9]\d*))?")


def pattern_names(pattern: str, allowed: Sequence[str]) -> list[str]:
    """The names in ``pattern``, which may be one name alone, each as often as it stands for a layer: one period.

    Raises:
        ValueError: a pattern of another form, or a name that is not in ``allowed``.
    """
    given, named = f"`layers` is {pattern!r}", []
    for item in pattern.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise ArgumentError(f"{given}, with {item.strip()!r}; allowed: NAME or NAME*COUNT, separated by commas")
        if found["name"] not in allowed:
            raise ArgumentError(f"{given}, with {found['name']!r}; allowed: {', '.join(allowed)}")
        named += [found["name"]] * int(found["count"] or 1)
    return named


def layer_kinds(pattern: str, allowed: Sequence[str], layers: Sequence[int], whole: bool = True) -> list[str]:
    """The name of the attention of each of ``layers``, numbers of layers from 0: that of a ``pattern`` that repeats.

    "flow*3,softmax" is flow in layers 0 to 2, softmax in layer 3, flow in layers 4 to 6, and so on. Spaces between
    names do not matter. Unless ``layers`` are the ``whole`` stack, it is not known how many there are.

    Raises:
        ValueError: as ``pattern_names``, and a pattern for more layers than there are.
    """
    named = pattern_names(pattern, allowed)
    if whole and len(named) > len(layers):
        raise ArgumentError(
            f"`layers` is {pattern!r}, a pattern of {len(named)} layers; "
            f"allowed: of at most {len(layers)}, as many as there are"
        )
    return [named[i % len(named)] for i in layers]
