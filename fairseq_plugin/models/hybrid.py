"""``hybrid_lm``, ``hybrid_mlm``, ``hybrid_classifier`` and ``hybrid``: stacks whose layers have different attentions.

``--lineartime-layers 'flow*3,softmax'`` is Flow-Attention in three layers, softmax attention in the fourth, and so on.
The attention called NAME has its own options, ``--NAME-...``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.utils import safe_getattr
from torch import nn

from common.attention import ATTENTIONS, layer_kinds, supporting

from ..loading.known_options import flag_of, option_field
from ..modules.transformer_layer import LinearTimeDecoderLayer, LinearTimeEncoderLayer
from ._classifier import LinearTimeClassifier
from ._configuration import register_architecture
from ._decoder import BuildLayer
from ._encoder_decoder import BuildsLayers, LinearTimeTransformer, design_of
from ._language_model import LinearTimeLanguageModel, LinearTimeLanguageModelConfig, register_language_model
from ._masked_model import LinearTimeMaskedModel
from ._options import attention_config, build_design, errors_with_options, option
from .encoder_decoder import SIZES, complete

_PATTERN = "lineartime_layers"


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
CAUSAL, BIDIRECTIONAL = _configs("causal"), _configs("bidirectional")
CausalOptions = dataclass(type("CausalOptions", (LayerOptions, *CAUSAL.values()), {"__module__": __name__}))


def kinds_of_layers(model: type, args, side: str, configs: dict[str, type]) -> list[str]:
    """The attention of each layer of ``side``, decoder or encoder, that ``--SIDE-layers-to-keep`` keeps.

    ``configs`` has the options dataclass of each attention that ``model`` may have.

    Raises:
        ValueError: the pattern does not fit, or an option is given for an attention that no layer has.
    """
    layers_to_keep = safe_getattr(args, f"{side}_layers_to_keep")
    layers = (
        [int(i) for i in layers_to_keep.split(",")] if layers_to_keep else list(range(getattr(args, f"{side}_layers")))
    )
    with errors_with_options(model, "lineartime", side):
        kinds = layer_kinds(option(args, LayerOptions, _PATTERN), list(configs), layers, whole=not layers_to_keep)
    _check_options_are_read(args, set(kinds), configs)
    return kinds


def _check_options_are_read(args, kinds: set[str], configs: dict[str, type]) -> None:
    """Raise ValueError for an option that would have no effect, since its attention is not in ``kinds``."""
    for name, config in configs.items():
        names = config.__dataclass_fields__.keys() - FairseqDataclass.__dataclass_fields__.keys()
        for option_name in sorted(names) if name not in kinds else ():
            value = option(args, config, option_name)
            if value != getattr(config, option_name):
                pattern = option(args, LayerOptions, _PATTERN)
                flag = flag_of(_PATTERN)
                raise ValueError(
                    f"{flag_of(option_name)} is {value} and {flag} {pattern!r}; allowed: with {name} in {flag}"
                )


def in_turn(model: type, side: str, kinds: list[str], build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A function whose i-th call is ``build(kinds[i], ...)``."""
    remaining: Iterator[str] = iter(kinds)

    def build_next(*arguments: Any, **options: Any) -> nn.Module:
        kind = next(remaining)
        with errors_with_options(model, kind, side):
            return build(kind, *arguments, **options)

    return build_next


@dataclass
class HybridLanguageModelConfig(CausalOptions, LinearTimeLanguageModelConfig):
    """Options of ``hybrid_lm``."""


@register_language_model("hybrid_lm", dataclass=HybridLanguageModelConfig)
class HybridLanguageModel(LinearTimeLanguageModel):
    """A language model whose layers have the attentions of ``--lineartime-layers``, each with its usual cost."""

    option_prefix = "lineartime"
    stock_model = TransformerLanguageModel

    @classmethod
    def layer_builder(cls, args) -> BuildLayer:
        """A function that builds the next layer at each call, with the attention of that layer."""
        kinds = kinds_of_layers(cls, args, "decoder", CAUSAL)

        def build(kind: str, cfg: TransformerConfig, no_encoder_attn: bool) -> nn.Module:
            design = build_design(args, kind, CAUSAL[kind], args.max_target_positions)
            return LinearTimeDecoderLayer(cfg, no_encoder_attn, design=design)

        return in_turn(cls, "decoder", kinds, build)


class HybridMaskedModel(LinearTimeMaskedModel):
    """A masked model whose layers have the attentions of ``--lineartime-layers``."""

    option_prefix = "lineartime"
    stock_model = RobertaModel
    option_classes = (LayerOptions, *BIDIRECTIONAL.values())

    @classmethod
    def layer_builder(cls, args) -> Callable[[TransformerConfig], nn.Module]:
        """A function that builds the next layer at each call, with the attention of that layer."""
        kinds = kinds_of_layers(cls, args, "encoder", BIDIRECTIONAL)

        def build(kind: str, cfg: TransformerConfig) -> nn.Module:
            return LinearTimeEncoderLayer(cfg, design=build_design(args, kind, BIDIRECTIONAL[kind], args.max_positions))

        return in_turn(cls, "encoder", kinds, build)


class HybridClassifier(LinearTimeClassifier, HybridMaskedModel):
    """A classifier of sequences whose layers have the attentions of ``--lineartime-layers``."""

    stock_model = None
    option_classes = (*HybridMaskedModel.option_classes, *LinearTimeClassifier.option_classes)


BidirectionalOptions = dataclass(
    type("BidirectionalOptions", (LayerOptions, *BIDIRECTIONAL.values()), {"__module__": __name__})
)


class BuildsHybridLayers(BuildsLayers):
    """Mixin before an encoder-decoder whose layers, on both sides, have the attentions of ``--lineartime-layers``.

    In the decoder, softmax attention replaces an attention that is not causal, as in ``NAME``.
    """

    option_prefix = attention_name = "lineartime"
    options_class = BidirectionalOptions

    @classmethod
    def layer_builder(cls, args, causal: bool) -> Callable[..., nn.Module]:
        """A function that builds the next layer at each call, with the attention of that layer."""
        side = "decoder" if causal else "encoder"
        kinds = kinds_of_layers(cls, args, side, BIDIRECTIONAL)
        builders = {
            kind: cls.with_design(args, causal, partial(design_of, args, kind, BIDIRECTIONAL[kind]))
            for kind in set(kinds)
        }
        return in_turn(cls, side, kinds, lambda kind, *host: builders[kind](*host))


class HybridTransformer(BuildsHybridLayers, LinearTimeTransformer):
    """fairseq's ``transformer`` whose layers have the attentions of ``--lineartime-layers``."""

    stock_model = TransformerModel


for _name, _model in (("hybrid_mlm", HybridMaskedModel), ("hybrid_classifier", HybridClassifier)):
    register_architecture(_name, _name)(register_model(_name)(_model).complete_options)
register_model("hybrid")(HybridTransformer)
for _size, _architecture in SIZES.items():
    register_architecture("hybrid", f"hybrid{_size}")(partial(complete, _architecture))
