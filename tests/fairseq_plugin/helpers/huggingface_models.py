"""Small models of fairseq, and the same models for transformers with the same weights."""

import functools
from typing import Any

from torch import nn
from transformers.utils import ModelOutput

from common.huggingface import (
    LineartimeCache,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
)
from fairseq_plugin.export.huggingface import configuration_of

from . import encoder_decoders, kinds, masked_models
from .language_models import awake, build
from .text import dictionary


def convert(host: nn.Module, args: Any, model_class: type) -> nn.Module:
    """The model of ``model_class`` with the configuration and the weights of ``host``, in evaluation mode."""
    model = model_class(configuration_of(host, args, dictionary()))
    weights = {name: x for name, x in host.state_dict().items() if not name.endswith("version")}
    model.load_state_dict(weights)  # strict: the names are those of fairseq
    return model.eval()


@functools.cache
def language_models(arch: str, *flags: str) -> tuple[nn.Module, LineartimeForCausalLM]:
    """fairseq's language model and its counterpart."""
    host = awake(kinds.build(arch, *flags)).eval()
    return host, convert(host, host.decoder.args, LineartimeForCausalLM)


@functools.cache
def masked(arch: str, *flags: str) -> tuple[nn.Module, LineartimeForMaskedLM]:
    """fairseq's masked model and its counterpart."""
    host = masked_models.randomised(masked_models.build_masked(arch, *flags), std=0.2).eval()
    return host, convert(host, host.args, LineartimeForMaskedLM)


@functools.cache
def classifiers(arch: str, *flags: str) -> tuple[nn.Module, LineartimeForSequenceClassification]:
    """fairseq's classifier of three classes and its counterpart."""
    task = "data --task sentence_prediction --criterion sentence_prediction --max-positions 128".split()
    host = build([*task, "--arch", arch, *masked_models.small(arch), *flags])
    host.register_classification_head("sentence_classification_head", num_classes=3)
    host = masked_models.randomised(host, std=0.2).eval()
    return host, convert(host, host.args, LineartimeForSequenceClassification)


@functools.cache
def encoder_decoder(arch: str, *flags: str) -> tuple[nn.Module, LineartimeForSeq2SeqLM]:
    """fairseq's encoder-decoder and its counterpart."""
    host = encoder_decoders.build_model(arch, *flags)
    return host, convert(host, host.args, LineartimeForSeq2SeqLM)


def cache_of(output: ModelOutput) -> LineartimeCache:
    """The cache in the output of a model, under its name in the installed version of transformers."""
    return output["cache"] if "cache" in output else output["past_key_values"]
