"""Loads the model of a folder that has a copy of this file, with ``trust_remote_code=True``; it needs lineartime.

The classes are defined here, so that ``save_pretrained`` copies this file again and not those of lineartime.
"""

try:  # in this form transformers does not ask for a package "common", which is somebody else's
    from common import huggingface
except ImportError as error:
    raise ImportError(
        f"this model needs the package lineartime, which cannot be imported ({error}). It is installed from its "
        "source, which whoever gave you the model has; in its folder, type: pip install '.[huggingface]'"
    ) from error


class LineartimeConfig(huggingface.LineartimeConfig):
    """The configuration of the folder."""


class LineartimeModel(huggingface.LineartimeModel):
    """The model of the folder without its head."""

    config_class = LineartimeConfig


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
