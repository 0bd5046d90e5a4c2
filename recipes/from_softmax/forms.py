"""The attentions that a trained softmax model gets here, by names that users type."""

import re
from typing import NamedTuple

from common.attention import layer_kinds
from common.attention.lolcats import LolcatsOptions
from common.ops.shared.checks import ArgumentError

#: Attentions of this comparison by their names: the mechanism, and the option that makes it so.
_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in ("flow", "linear", "cosformer", "favor", "t2r", "hedgehog", "lolcats", "softmax")},
    "lolcats_relu": ("lolcats", {"feature_map": "relu"}),
}
_SOFTMAX, _WINDOWED = "softmax", "lolcats"
#: What the window of lolcats weighs at first.
WINDOW_WEIGHT = LolcatsOptions.window_weight
#: Every form by itself, and with one softmax layer in four.
PLAIN = [name for name in _NAMES if name != _SOFTMAX]
DEFAULT = [*PLAIN, *(f"{name}*3,{_SOFTMAX}" for name in PLAIN)]


class Form(NamedTuple):
    """One way to exchange the attention of a model."""

    name: str  # as typed
    pattern: str  # the same as --lineartime-layers takes it
    kinds: list[str]  # the mechanism of each layer
    options: dict[str, dict[str, object]]  # of each mechanism that has some

    def own_options(self) -> dict[str, object]:
        """The options of all mechanisms, for timm's models, where each takes its own."""
        return {option: value for given in self.options.values() for option, value in given.items()}

    @property
    def softmax_layers(self) -> list[int]:
        """The layers that keep softmax attention."""
        return [i for i, kind in enumerate(self.kinds) if kind == _SOFTMAX]

    @property
    def windowed(self) -> bool:
        """Whether a layer has a softmax window beside its linear part."""
        return _WINDOWED in self.kinds

    @property
    def learns_maps(self) -> bool:
        """Whether each linear layer has maps of its own, which stage 1 teaches to imitate softmax."""
        return all(kind in ("t2r", "hedgehog", _WINDOWED) for kind in self.kinds if kind != _SOFTMAX)


def form(name: str, layers: int, window: int, window_weight: float = WINDOW_WEIGHT) -> Form:
    """The form called ``name``, NAME or a pattern such as "flow*3,softmax", in a model of so many ``layers``.

    ``window`` is the window of the layers that have one, ``window_weight`` what it weighs at first.

    Raises:
        ValueError: a name that is not known, a pattern that does not fit, softmax attention alone, two forms of the
            same mechanism, or a window that cannot be.
    """
    try:
        names = layer_kinds(name, list(_NAMES), range(layers))
    except ArgumentError as error:
        raise ValueError(error.with_names({"layers": "--models"})) from error
    kinds = [_NAMES[one][0] for one in names]
    if set(kinds) == {_SOFTMAX}:
        raise ValueError(f"--models has {name!r}; allowed: at least one layer that is not {_SOFTMAX}")
    options: dict[str, dict[str, object]] = {}
    for one in dict.fromkeys(names):
        kind, given = _NAMES[one]
        if kind == _WINDOWED:
            given = given | {"window": window, "window_weight": window_weight}
            _check(given)
        if options.setdefault(kind, given) != given:
            raise ValueError(f"--models has {name!r}, with two forms of {kind}; allowed: one in a model")
    pattern = re.sub(r"[a-z]\w*", lambda found: _NAMES[found[0]][0], name)
    return Form(name, pattern, kinds, {kind: given for kind, given in options.items() if given})


def _check(given: dict[str, object]) -> None:
    """Raise ValueError if the window or its weight is not possible."""
    try:
        LolcatsOptions(**given)
    except ArgumentError as error:
        names = {"window": "--window", "window_weight": "--window-weight"}
        raise ValueError(error.with_names(names)) from error
