"""Models of lineartime for Hugging Face's transformers, without fairseq; only this package imports transformers.

Importing it registers the models with ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM``,
``AutoModelForMaskedLM``, ``AutoModelForSequenceClassification`` and ``AutoModelForSeq2SeqLM``, which then load their
folders.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .cache import LineartimeCache
from .configuration import GATED_ATTENTION_UNIT, LayerAttention, LineartimeConfig
from .modeling import (
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
    LineartimeModel,
)

#: The model of each of transformers' classes.
AUTO_CLASSES = {
    AutoModel: LineartimeModel,
    AutoModelForCausalLM: LineartimeForCausalLM,
    AutoModelForMaskedLM: LineartimeForMaskedLM,
    AutoModelForSequenceClassification: LineartimeForSequenceClassification,
    AutoModelForSeq2SeqLM: LineartimeForSeq2SeqLM,
}

#: transformers' Trainer shifts labels for the models that this table names, with ``label_smoothing_factor``.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(LineartimeConfig.model_type, LineartimeForCausalLM.__name__)
AutoConfig.register(LineartimeConfig.model_type, LineartimeConfig, exist_ok=True)
for _auto, _model in AUTO_CLASSES.items():
    _auto.register(LineartimeConfig, _model, exist_ok=True)


__all__ = [
    "AUTO_CLASSES",
    "GATED_ATTENTION_UNIT",
    "LayerAttention",
    "LineartimeCache",
    "LineartimeConfig",
    "LineartimeForCausalLM",
    "LineartimeForMaskedLM",
    "LineartimeForSeq2SeqLM",
    "LineartimeForSequenceClassification",
    "LineartimeModel",
]
