"""``NAME_lm``, ``NAME_mlm`` and ``NAME_classifier`` for every attention NAME, derived from its declaration alone.

A mechanism of ``common.attention`` that supports "causal" has a language model, one that supports "bidirectional" a
masked model and a classifier. Their ``--NAME-...`` options are the ones it declares. A model that another file of this
folder defines under the same name stays as that file has it.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from torch import nn

from common.attention import ATTENTIONS, supporting
from common.ops.shared.checks import check_positive_int

from ..modules.multihead_attention import LayerDesign
from ..modules.transformer_layer import LinearTimeEncoderLayer
from . import daft, flash, flash_masked, flowformer  # noqa: F401  their names come first
from ._classifier import LinearTimeClassifier
from ._language_model import LinearTimeLanguageModel, LinearTimeLanguageModelConfig, register_language_model
from ._masked_model import LinearTimeMaskedModel
from ._options import attention_config, attention_options, camel_case, option

#: Further names of mechanisms in names of models.
FURTHER_NAMES = {"flow": ("flowformer",)}


class AttentionLanguageModel(LinearTimeLanguageModel):
    """A language model over the mechanism ``attention_name``, with the options of ``options_class``."""

    options_class: type

    @classmethod
    def layer_design(cls, args) -> LayerDesign:
        """The parts of a layer, from the model's configuration."""
        return build_design(args, cls.attention_name, cls.options_class, args.max_target_positions)


class AttentionMaskedModel(LinearTimeMaskedModel):
    """A masked model over the mechanism ``attention_name``, with the options of ``options_class``."""

    attention_name: str
    options_class: type

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig) -> nn.Module:
        """One layer of the encoder, not yet wrapped."""
        design = build_design(args, cls.attention_name, cls.options_class, args.max_positions)
        return LinearTimeEncoderLayer(cfg, design=design)


@dataclass
class ProjectionOptions(FairseqDataclass):
    """Options of the projections around a classifier's attention, which RoBERTa has not."""

    encoder_attention_dim: Optional[int] = field(
        default=None, metadata={"help": "channels of all heads together; default: the encoder's width"}
    )
    encoder_attention_no_bias: bool = field(
        default=False, metadata={"help": "no bias in the projections to queries, keys and values and of the result"}
    )


class AttentionClassifier(LinearTimeClassifier, AttentionMaskedModel):
    """A classifier over the mechanism ``attention_name``, with the options of ``options_class``."""

    option_classes = (ProjectionOptions,)

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig) -> nn.Module:
        """One layer of the encoder, not yet wrapped."""
        dim = option(args, ProjectionOptions, "encoder_attention_dim")
        if dim is not None:
            check_positive_int("encoder_attention_dim", dim)
        design = replace(
            build_design(args, cls.attention_name, cls.options_class, args.max_positions),
            attention_dim=dim,
            projection_bias=not option(args, ProjectionOptions, "encoder_attention_no_bias"),
        )
        return LinearTimeEncoderLayer(cfg, design=design)


def build_design(args, attention: str, config: type, max_tokens: int) -> LayerDesign:
    """The parts of a layer with ``attention``, whose options are fields of ``config``."""
    options: dict[str, Any] = attention_options(args, attention, config)
    rotary = options.pop("rotary", False)
    return LayerDesign(attention, options, rotary=rotary, max_tokens=max_tokens)


def _subclass(bases: tuple[type, ...], prefix: str, suffix: str, **attributes: Any) -> type:
    """A subclass of ``bases`` that this file holds under its name, so that pickle finds it."""
    name = camel_case(prefix) + suffix
    globals()[name] = type(name, bases, {"__module__": __name__, "__doc__": bases[0].__doc__, **attributes})
    return globals()[name]


def _register_language_model(prefix: str, attention: str, options: type) -> None:
    config = dataclass(_subclass((options, LinearTimeLanguageModelConfig), prefix, "LanguageModelConfig"))
    attributes = {"attention_name": attention, "option_prefix": attention, "options_class": config}
    model = _subclass((AttentionLanguageModel,), prefix, "LanguageModel", **attributes)
    register_language_model(f"{prefix}_lm", dataclass=config)(model)


def _register_encoder(base: type, prefix: str, attention: str, options: type, kind: str, suffix: str) -> None:
    attributes = {"attention_name": attention, "option_prefix": attention}
    attributes |= {"options_class": options, "option_classes": (options, *base.option_classes)}
    model = register_model(f"{prefix}_{kind}")(_subclass((base,), prefix, suffix, **attributes))
    register_model_architecture(f"{prefix}_{kind}", f"{prefix}_{kind}")(model.complete_options)


def _register(prefix: str, attention: str) -> None:
    supports = ATTENTIONS[attention].supports
    if "causal" in supports and f"{prefix}_lm" not in MODEL_REGISTRY:
        _register_language_model(prefix, attention, attention_config(attention, causal=True))
    if attention in supporting("bidirectional"):
        options = attention_config(attention)
        register = partial(_register_encoder, prefix=prefix, attention=attention, options=options)
        if f"{prefix}_mlm" not in MODEL_REGISTRY:
            register(AttentionMaskedModel, kind="mlm", suffix="MaskedModel")
        register(AttentionClassifier, kind="classifier", suffix="Classifier")


for _attention in ATTENTIONS:
    for _prefix in (_attention, *FURTHER_NAMES.get(_attention, ())):
        _register(_prefix, _attention)
