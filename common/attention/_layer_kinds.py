"""Stacks whose layers have several kinds of attention: a pattern such as "flow*3,softmax", which repeats."""

import re
from collections.abc import Sequence

from ..ops.shared.checks import ArgumentError, allowed_names, shortened

_ITEM = re.compile(r"(?P<name>\w+)(\*(?P<count>[1-9]\d*))?")
#: Layers of one period: far more than a model has, and few enough to be listed one by one.
_MOST = 10_000


def pattern_names(pattern: str, allowed: Sequence[str]) -> list[str]:
    """The names in ``pattern``, which may be one name alone, each as often as it stands for a layer: one period.

    Raises:
        ValueError: a pattern of another form or of more than 10,000 layers, or a name that is not in ``allowed``.
    """
    given, named = f"`layers` is {shortened(pattern)}", []
    for item in pattern.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise ArgumentError(
                f"{given}, with {shortened(item.strip())}; allowed: NAME or NAME*COUNT, separated by commas"
            )
        if found["name"] not in allowed:
            raise ArgumentError(f"{given}, with {shortened(found['name'])}; {allowed_names(found['name'], allowed)}")
        count = found["count"] or "1"
        if len(count) > len(str(_MOST)) or len(named) + int(count) > _MOST:
            raise ArgumentError(f"{given}, a pattern of more than {_MOST} layers; allowed: of at most {_MOST}")
        named += [found["name"]] * int(count)
    return named


def layer_kinds(pattern: str, allowed: Sequence[str], layers: Sequence[int], whole: bool = True) -> list[str]:
    """The name of the attention of each of ``layers``, numbers of layers from 0: that of a ``pattern`` that repeats.

    "flow*3,softmax" is flow in layers 0 to 2, softmax in layer 3, flow in layers 4 to 6, and so on. Workspaces between
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
