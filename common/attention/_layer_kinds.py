"""Models that mix kinds of attention by layer, following a repeated pattern such as "flow*3,softmax"."""

import re
from collections.abc import Sequence

from ..ops.shared.checks import ArgumentError, allowed_names, shortened

_ITEM = re.compile(r"(?P<name>\w+)(\*(?P<count>[1-9]\d*))?")
#: Limit on the layers of one period: far more than a model has, and few enough to list.
_MOST = 10_000


def pattern_names(pattern: str, allowed: Sequence[str]) -> list[str]:
    """The attention names of one period of ``pattern``, one per layer; a pattern may be a single name.

    Raises:
        ValueError: a malformed pattern, one of more than 10,000 layers, or a name that is not in ``allowed``.
    """
    problem, names = f"`layers` is {shortened(pattern)}", []
    for item in pattern.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ArgumentError(
                f"{problem}, with {shortened(item.strip())}; allowed: NAME or NAME*COUNT, separated by commas"
            )
        if match["name"] not in allowed:
            raise ArgumentError(f"{problem}, with {shortened(match['name'])}; {allowed_names(match['name'], allowed)}")
        count = match["count"] or "1"
        if len(count) > len(str(_MOST)) or len(names) + int(count) > _MOST:
            raise ArgumentError(f"{problem}, a pattern of more than {_MOST} layers; allowed: of at most {_MOST}")
        names += [match["name"]] * int(count)
    return names


def layer_kinds(pattern: str, allowed: Sequence[str], layers: Sequence[int], whole: bool = True) -> list[str]:
    """The name of the attention in each of ``layers``, layer numbers from 0, for a repeated ``pattern``.

    "flow*3,softmax" is flow in layers 0 to 2, softmax in layer 3, flow in layers 4 to 6, and so on. Spaces around
    names do not matter. ``whole`` says that ``layers`` are all layers of the model; otherwise their number is unknown.

    Raises:
        ValueError: as ``pattern_names``, or a pattern that is longer than the whole model.
    """
    names = pattern_names(pattern, allowed)
    if whole and len(names) > len(layers):
        raise ArgumentError(
            f"`layers` is {pattern!r}, a pattern of {len(names)} layers; "
            f"allowed: of at most {len(layers)}, as many as there are"
        )
    return [names[i % len(names)] for i in layers]
