"""Loads the model of a folder that has a copy of this file, with ``trust_remote_code=True``; it needs lineartime.

The classes are defined here, so that ``save_pretrained`` copies this file again and not those of lineartime.
"""

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
