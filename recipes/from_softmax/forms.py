"""The attentions that replace softmax in a trained model, by the names that users type, and parts of some of them."""

import argparse
import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from common.attention import ATTENTIONS, LolcatsAttention, layer_kinds, only_part
from common.attention.lolcats import LolcatsOptions

SOFTMAX = "softmax"
#: Form -> its mechanism, where it has another name, and an option of it.
_OTHERS = {"lolcats_relu": ("lolcats", {"feature_map": "relu"})}
#: Every form in all layers, and with softmax in one layer of four.
PLAIN = "flow linear cosformer favor t2r hedgehog lolcats lolcats_relu local longformer".split()
DEFAULT = [*PLAIN, *(f"{name}*3,{SOFTMAX}" for name in PLAIN)]
#: Mechanisms with maps of their own, which stage 1 teaches to imitate softmax.
_WITH_MAPS = ("t2r", "hedgehog", "lolcats")
#: Mechanism -> its options that are options of the commands.
_SIZES = {
    "lolcats": ("window", "window_weight"),
    "local": ("window",),
    "longformer": ("window", "global_tokens"),
}
#: The parts of an attention with a softmax window.
WHOLE, WINDOW, LINEAR, NOTHING = PARTS = ("whole", "window alone", "linear part alone", "no attention")


class Form(NamedTuple):
    """One way to exchange the attention of a model."""

    pattern: str  # as --lineartime-layers accepts it
    kinds: list[str]  # the mechanism of each layer
    options: dict[str, dict[str, object]]  # of each mechanism that has some

    def for_timm(self) -> dict[str, object]:
        """The options of all mechanisms together; each mechanism picks its own."""
        return {option: value for values in self.options.values() for option, value in values.items()}

    def overrides(self) -> dict[str, object]:
        """The options of a stack of fairseq, as ``--model-overrides`` accepts them."""
        options = {f"{kind}_{key}": x for kind, values in self.options.items() for key, x in values.items()}
        return {"lineartime_layers": self.pattern, **options}

    def arguments(self) -> list[object]:
        """``overrides`` as arguments of fairseq-train."""
        return [word for name, x in self.overrides().items() for word in (f"--{name.replace('_', '-')}", x)]

    @property
    def windowed(self) -> bool:
        """Whether a layer has a softmax window in addition to its linear part."""
        return "lolcats" in self.kinds

    @property
    def learning(self) -> str:
        """Stage 1's parameters: an attention without maps of its own can learn only its projections."""
        return "new" if all(kind in _WITH_MAPS for kind in self.kinds if kind != SOFTMAX) else "attention"


def add_options(parser: argparse.ArgumentParser, models: list[str], sinks: int = 4) -> None:
    """Sizes of the forms that have a window; ``models``: the forms by default, if the parser has no ``--models``."""
    weight = LolcatsOptions.window_weight
    parser.add_argument("--window", type=int, default=16, help="tokens, of lolcats, local and longformer")
    parser.add_argument("--window-weight", type=float, default=weight, help="of lolcats' window, at first")
    parser.add_argument("--sinks", type=int, default=sinks, help="first tokens that longformer sees beside its window")
    if parser.get_default("models") is None:
        about = "NAME, or a pattern as in flow*3,softmax; see the README"
        parser.add_argument("--models", nargs="+", metavar="NAME", default=models, help=about)


def form(name: str, layers: int, options: argparse.Namespace) -> Form:
    """The form called ``name``, or a pattern such as "flow*3,softmax", in a model of ``layers``; ValueError if none."""
    names = layer_kinds(name, [*PLAIN, SOFTMAX], range(layers))
    if set(names) == {SOFTMAX}:
        raise ValueError(f"{name} is the teacher; allowed: at least one layer that is not {SOFTMAX}")
    given = {"window": options.window, "window_weight": options.window_weight, "global_tokens": options.sinks}
    values: dict[str, dict[str, object]] = {}
    for part in dict.fromkeys(names):
        kind, own = _OTHERS.get(part, (part, {}))
        own = own | {option: given[option] for option in _SIZES.get(kind, ())}
        ATTENTIONS[kind].Options(**own)  # checks them
        if values.setdefault(kind, own) != own:
            raise ValueError(f"{name} has two forms of {kind}; allowed: one in a model")
    mechanism = {part: _OTHERS.get(part, (part,))[0] for part in names}
    pattern = re.sub(r"[a-z]\w*", lambda found: mechanism[found[0]], name)
    return Form(pattern, [mechanism[part] for part in names], {kind: own for kind, own in values.items() if own})


def forms(parser: argparse.ArgumentParser, options: argparse.Namespace, layers: int) -> dict[str, Form]:
    """The forms of ``--models`` by name; the parser's error if one is none."""
    try:
        return {name: form(name, layers, options) for name in options.models}
    except ValueError as error:
        parser.error(f"--models {' '.join(options.models)}: {error}")


@contextlib.contextmanager
def attending(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, attentions of ``model`` with a window compute ``part``, one of ``PARTS``; other layers do not change."""
    if part != NOTHING:
        with only_part(model, {WHOLE: "both", WINDOW: "window", LINEAR: "linear"}[part]):
            yield
        return
    attentions = [module for module in model.modules() if isinstance(module, LolcatsAttention)]
    hooks = [module.register_forward_hook(lambda *called: torch.zeros_like(called[-1])) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
