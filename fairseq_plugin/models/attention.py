"""``NAME_lm``, ``NAME_mlm`` and ``NAME_classifier`` for every attention NAME, derived from its declaration.

A mechanism of ``common.attention`` that supports "causal" has a language model, one that supports "bidirectional" a
masked model and a classifier. Their ``--NAME-...`` options are the ones it declares. A model that another file of this
folder defines under the same name is not replaced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_REGISTRY, register_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer_lm import TransformerLanguageModel

from common.ops.shared.checks import check_positive_int

from ..loading.known_options import option_field
from ..modules.multihead_attention import LayerDesign
from . import daft, flash, flash_masked, flowformer  # noqa: F401  these register their names first
from ._classifier import LinearTimeClassifier
from ._configuration import register_architecture
from ._language_model import LinearTimeLanguageModel, LinearTimeLanguageModelConfig, register_language_model
from ._masked_model import LinearTimeMaskedModel
from ._options import attention_config, camel_case, option
from ._registration import derive, make_config, make_model, takes_stock_weights


@dataclass
class ProjectionOptions(FairseqDataclass):
    """Options of the projections around a classifier's attention, which RoBERTa does not have."""

    encoder_attention_dim: Optional[int] = option_field(
        None, "channels of all heads together; default: the encoder's width"
    )
    encoder_attention_no_bias: bool = option_field(
        False, "no bias in the projections to queries, keys and values and of the result"
    )


class AttentionClassifier(LinearTimeClassifier):
    """A classifier with the mechanism ``attention_name`` and the options of ``options_class``."""

    option_classes = (ProjectionOptions,)

    @classmethod
    def designs(cls, args, *place: Any) -> Iterator[LayerDesign]:
        """The design of each layer, with its own projections."""
        dim = option(args, ProjectionOptions, "encoder_attention_dim")
        if dim is not None:
            check_positive_int("encoder_attention_dim", dim)
        bias = not option(args, ProjectionOptions, "encoder_attention_no_bias")
        return (replace(x, attention_dim=dim, projection_bias=bias) for x in super().designs(args, *place))


def _register_language_model(prefix: str, attention: str) -> None:
    if f"{prefix}_lm" in MODEL_REGISTRY:
        return
    name, options = f"{camel_case(prefix)}LanguageModel", attention_config(attention, causal=True)
    config = make_config(__name__, f"{name}Config", options, LinearTimeLanguageModelConfig)
    stock = TransformerLanguageModel if takes_stock_weights(attention) else None
    model = make_model(__name__, name, LinearTimeLanguageModel, attention, config, stock_model=stock)
    register_language_model(f"{prefix}_lm", dataclass=config)(model)


def _register_encoder(base: type, prefix: str, attention: str, kind: str, last_words: str) -> None:
    options, name = attention_config(attention), f"{prefix}_{kind}"
    stock = RobertaModel if base is LinearTimeMaskedModel and takes_stock_weights(attention) else None
    attributes = {"option_classes": (options, *base.option_classes), "stock_model": stock}
    model = make_model(__name__, camel_case(prefix) + last_words, base, attention, options, **attributes)
    register_architecture(name, name)(register_model(name)(model).complete_options)


def _register_encoders(prefix: str, attention: str) -> None:
    if f"{prefix}_mlm" not in MODEL_REGISTRY:
        _register_encoder(LinearTimeMaskedModel, prefix, attention, "mlm", "MaskedModel")
    _register_encoder(AttentionClassifier, prefix, attention, "classifier", "Classifier")


derive("causal", _register_language_model)
derive("bidirectional", _register_encoders)
