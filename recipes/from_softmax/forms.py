"""The attentions that replace softmax in a trained model, by the names that users type."""

import re
from typing import NamedTuple

from common.attention import layer_kinds
from common.attention.lolcats import LolcatsOptions
from common.ops.shared.checks import ArgumentError

#: The attentions of this comparison by name: the mechanism and its options.
_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in ("flow", "linear", "cosformer", "favor", "t2r", "hedgehog", "lolcats", "softmax")},
    "lolcats_relu": ("lolcats", {"feature_map": "relu"}),
    **{name: (name, {}) for name in ("local", "longformer")},
}
_SOFTMAX, _WINDOWED = "softmax", "lolcats"
#: Initial weight of lolcats' window.
WINDOW_WEIGHT = LolcatsOptions.window_weight
#: Every form in all layers, and with softmax in one layer of four.
PLAIN = [name for name in _NAMES if name != _SOFTMAX]
DEFAULT = [*PLAIN, *(f"{name}*3,{_SOFTMAX}" for name in PLAIN)]


class Windows(NamedTuple):
    """The sizes of the forms that have a softmax window."""

    window: int  # tokens
    weight: float = WINDOW_WEIGHT  # of lolcats' window, at first
    sinks: int = 4  # first tokens that longformer sees beside its window

    def options(self, kind: str) -> dict[str, object]:
        """The options of the mechanism ``kind`` that are sizes; empty for one without a window."""
        if kind == _WINDOWED:
            return {"window": self.window, "window_weight": self.weight}
        sinks = {"global_tokens": self.sinks} if kind == "longformer" else {}
        return {"window": self.window, **sinks} if kind in ("local", "longformer") else {}


class Form(NamedTuple):
    """One way to exchange the attention of a model."""

    name: str  # as typed
    pattern: str  # as --lineartime-layers accepts it
    kinds: list[str]  # the mechanism of each layer
    options: dict[str, dict[str, object]]  # of each mechanism that has some

    def own_options(self) -> dict[str, object]:
        """The options of all mechanisms together, for timm's models, where each mechanism picks its own."""
        return {option: value for values in self.options.values() for option, value in values.items()}

    def overrides(self) -> dict[str, object]:
        """The options of a stack of fairseq with this form, as ``--model-overrides`` accepts them."""
        options = {f"{kind}_{key}": x for kind, values in self.options.items() for key, x in values.items()}
        return {"lineartime_layers": self.pattern, **options}

    def arguments(self) -> list[object]:
        """``overrides`` as arguments of fairseq-train."""
        pairs = ((f"--{name.replace('_', '-')}", value) for name, value in self.overrides().items())
        return [word for pair in pairs for word in pair]

    @property
    def softmax_layers(self) -> list[int]:
        """The layers that keep softmax attention."""
        return [i for i, kind in enumerate(self.kinds) if kind == _SOFTMAX]

    @property
    def windowed(self) -> bool:
        """Whether a layer has a softmax window in addition to its linear part."""
        return _WINDOWED in self.kinds

    @property
    def learns_maps(self) -> bool:
        """Whether each linear layer has maps of its own, which stage 1 teaches to imitate softmax."""
        return all(kind in ("t2r", "hedgehog", _WINDOWED) for kind in self.kinds if kind != _SOFTMAX)


def form(name: str, layers: int, windows: Windows) -> Form:
    """The form called ``name``, NAME or a pattern such as "flow*3,softmax", in a model with this number of ``layers``.

    Raises:
        ValueError: a name that is not known, a pattern that does not fit, softmax attention alone, two forms of the
            same mechanism, or an invalid window.
    """
    try:
        names = layer_kinds(name, list(_NAMES), range(layers))
    except ArgumentError as error:
        raise ValueError(error.with_names({"layers": "--models"})) from error
    kinds = [_NAMES[form_name][0] for form_name in names]
    if set(kinds) == {_SOFTMAX}:
        raise ValueError(f"--models has {name!r}; allowed: at least one layer that is not {_SOFTMAX}")
    options: dict[str, dict[str, object]] = {}
    for form_name in dict.fromkeys(names):
        kind, values = _NAMES[form_name]
        values = values | windows.options(kind)
        if kind == _WINDOWED:
            _check(values)
        if options.setdefault(kind, values) != values:
            raise ValueError(f"--models has {name!r}, with two forms of {kind}; allowed: one in a model")
    pattern = re.sub(r"[a-z]\w*", lambda found: _NAMES[found[0]][0], name)
    return Form(name, pattern, kinds, {kind: values for kind, values in options.items() if values})


def _check(given: dict[str, object]) -> None:
    """Raise ValueError if the window or its weight is invalid."""
    try:
        LolcatsOptions(**given)
    except ArgumentError as error:
        names = {"window": "--window", "window_weight": "--window-weight"}
        raise ValueError(error.with_names(names)) from error
