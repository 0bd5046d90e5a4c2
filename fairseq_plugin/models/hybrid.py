"""``hybrid_lm``, ``hybrid_mlm``, ``hybrid_classifier`` and ``hybrid``: stacks whose layers have different attentions.

``--lineartime-layers 'flow*3,softmax'`` is Flow-Attention in three layers, softmax attention in the fourth, and so on.
The attention called NAME has its own options, ``--NAME-...``.
"""

from dataclasses import dataclass
from functools import partial

from fairseq.models import register_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

from ._classifier import LinearTimeClassifier
from ._configuration import register_architecture
from ._encoder_decoder import LinearTimeTransformer
from ._language_model import LinearTimeLanguageModel, LinearTimeLanguageModelConfig, register_language_model
from ._layers import CONFIGS, BidirectionalOptions, CausalOptions, Hybrid, LayerOptions
from ._masked_model import LinearTimeMaskedModel
from .encoder_decoder import SIZES, complete


@dataclass
class HybridLanguageModelConfig(CausalOptions, LinearTimeLanguageModelConfig):
    """Options of ``hybrid_lm``."""


@register_language_model("hybrid_lm", dataclass=HybridLanguageModelConfig)
class HybridLanguageModel(Hybrid, LinearTimeLanguageModel):
    """A language model whose layers have the attentions of ``--lineartime-layers``, each with its usual cost."""

    stock_model = TransformerLanguageModel
    options_class = HybridLanguageModelConfig
    what = "causal"


class HybridMaskedModel(Hybrid, LinearTimeMaskedModel):
    """A masked model whose layers have the attentions of ``--lineartime-layers``."""

    stock_model = RobertaModel
    option_classes = (LayerOptions, *CONFIGS["bidirectional"].values())


class HybridClassifier(Hybrid, LinearTimeClassifier):
    """A classifier of sequences whose layers have the attentions of ``--lineartime-layers``."""

    option_classes = HybridMaskedModel.option_classes


class HybridTransformer(Hybrid, LinearTimeTransformer):
    """fairseq's ``transformer`` whose layers have the attentions of ``--lineartime-layers``."""

    stock_model = TransformerModel
    options_class = BidirectionalOptions


for _name, _model in (("hybrid_mlm", HybridMaskedModel), ("hybrid_classifier", HybridClassifier)):
    register_architecture(_name, _name)(register_model(_name)(_model).complete_options)
register_model("hybrid")(HybridTransformer)
for _size, _architecture in SIZES.items():
    register_architecture("hybrid", f"hybrid{_size}")(partial(complete, _architecture))
