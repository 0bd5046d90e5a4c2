"""Which attention the layers of a model have: one mechanism in all of them, or a pattern, as in flow*3,softmax."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.utils import safe_getattr
from torch import nn

from common.attention import ATTENTIONS, layer_kinds, supporting

from ..loading.known_options import flag_of, option_field
from ..modules.multihead_attention import LayerDesign
from ._options import attention_config, attention_options, design_of, errors_with_options, option

_PATTERN = "lineartime_layers"


class DesignsLayers:
    """Mixin before a model of fairseq whose layers have the mechanism ``attention_name``."""

    attention_name: str
    #: The prefix of the options of its attention, and the dataclass of these options.
    option_prefix: str
    options_class: type = FairseqDataclass
    #: Whether the options are those of an encoder and of a decoder.
    two_sides = False

    @classmethod
    def attention_options(cls, args) -> dict[str, Any]:
        """The options of the attention; an option that an older checkpoint lacks has its default."""
        return attention_options(args, cls.attention_name, cls.options_class, cls.option_prefix)

    @classmethod
    def designs(cls, args, side: str, causal: bool, max_tokens: int | None) -> Iterable[LayerDesign]:
        """The design of each layer of ``side``, decoder or encoder, in their order."""
        return repeat(design_of(cls.attention_name, cls.attention_options(args), causal, max_tokens, cls.two_sides))

    @classmethod
    def in_turn(
        cls, side: str, designs: Iterable[LayerDesign], build: Callable[..., nn.Module]
    ) -> Callable[..., nn.Module]:
        """A function whose i-th call is ``build(..., design=designs[i])``; errors name options of the command line."""
        remaining = iter(designs)

        def build_next(*host: Any) -> nn.Module:
            design = next(remaining)
            with errors_with_options(cls, cls.prefix_of(design), side):
                return build(*host, design=design)

        return build_next

    @classmethod
    def prefix_of(cls, design: LayerDesign) -> str:
        """The prefix of the options of a layer's attention."""
        return cls.option_prefix


@dataclass
class LayerOptions(FairseqDataclass):
    """Which attention each layer has."""

    lineartime_layers: str = option_field(
        "flow,softmax",
        "the attention of the layers, in their order, as a pattern that repeats: NAME or NAME*COUNT, "
        "separated by commas, as in flow*3,softmax; the options of NAME are --NAME-...",
    )


def _configs(what: str) -> dict[str, type]:
    """The options dataclass of every attention that supports ``what``, by the attention's name."""
    return {name: attention_config(name, causal="causal" in ATTENTIONS[name].supports) for name in supporting(what)}


#: Options dataclasses by attention, for causal and for bidirectional models.
CONFIGS = {what: _configs(what) for what in ("causal", "bidirectional")}
#: Dataclasses of all options of such a model.
OPTIONS = {
    what: dataclass(
        type(f"{what.capitalize()}Options", (LayerOptions, *CONFIGS[what].values()), {"__module__": __name__})
    )
    for what in CONFIGS
}
CausalOptions, BidirectionalOptions = OPTIONS.values()


class Hybrid:
    """Mixin before a model with ``DesignsLayers``: layers have the attentions of ``--lineartime-layers``.

    In a decoder beside an encoder, softmax attention replaces an attention that is not causal.
    """

    option_prefix = attention_name = "lineartime"
    #: What each attention supports: causal in language models, bidirectional in all others.
    what = "bidirectional"

    @classmethod
    def designs(cls, args, side: str, causal: bool, max_tokens: int | None) -> Iterator[LayerDesign]:
        """The design of each layer of ``side`` that ``--SIDE-layers-to-keep`` keeps.

        Raises:
            ValueError: the pattern does not fit, or an option is given for an attention that no layer has.
        """
        configs, to_keep = CONFIGS[cls.what], safe_getattr(args, f"{side}_layers_to_keep")
        layers = [int(i) for i in to_keep.split(",")] if to_keep else list(range(getattr(args, f"{side}_layers")))
        with errors_with_options(cls, "lineartime", side):
            kinds = layer_kinds(option(args, LayerOptions, _PATTERN), list(configs), layers, whole=not to_keep)
        _check_options_are_read(args, set(kinds), configs)
        options = {x: attention_options(args, x, configs[x]) for x in dict.fromkeys(kinds)}
        return iter([design_of(x, options[x], causal, max_tokens, cls.two_sides) for x in kinds])

    @classmethod
    def prefix_of(cls, design: LayerDesign) -> str:
        """The prefix of the options of a layer's attention, its name."""
        return design.attention


def _check_options_are_read(args, kinds: set[str], configs: dict[str, type]) -> None:
    """Raise ValueError for an option that would have no effect, since its attention is not in ``kinds``."""
    for name, config in configs.items():
        names = config.__dataclass_fields__.keys() - FairseqDataclass.__dataclass_fields__.keys()
        for option_name in sorted(names) if name not in kinds else ():
            value = option(args, config, option_name)
            if value != getattr(config, option_name):
                pattern, flag = option(args, LayerOptions, _PATTERN), flag_of(_PATTERN)
                raise ValueError(
                    f"{flag_of(option_name)} is {value} and {flag} {pattern!r}; allowed: with {name} in {flag}"
                )
