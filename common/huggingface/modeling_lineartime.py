"""Loads the model of this folder with ``trust_remote_code=True``; it needs lineartime, whose package is ``common``."""

from common import huggingface


class LineartimeConfig(huggingface.LineartimeConfig):
    """The configuration of the folder."""


class LineartimeForCausalLM(huggingface.LineartimeForCausalLM):
    """The language model of the folder."""

    config_class = LineartimeConfig


class LineartimeForMaskedLM(huggingface.LineartimeForMaskedLM):
    """The masked model of the folder."""

    config_class = LineartimeConfig


class LineartimeForSequenceClassification(huggingface.LineartimeForSequenceClassification):
    """The classifier of the folder."""

    config_class = LineartimeConfig


class LineartimeForSeq2SeqLM(huggingface.LineartimeForSeq2SeqLM):
    """The encoder-decoder of the folder."""

    config_class = LineartimeConfig
