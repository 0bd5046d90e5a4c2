"""Build models of fairseq and timm by name, each with a random input of a given size."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn


class Subject(NamedTuple):
    """A model and one input."""

    name: str
    size: str  # description of the input's size
    model: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of fairseq's inputs and outputs other than the length."""

    batch: int = 1
    vocabulary: int = 32_000  # symbols, including fairseq's own four
    channels: int = 12  # of a time series; channels and classes are those of JapaneseVowels
    classes: int = 9
    state: int = 17  # size of a state and of an action, those of HalfCheetah
    action: int = 6


DEFAULT = Sizes()


def timm_subject(name: str, img_size: int | None, kwargs: dict[str, Any], batch: int = 1) -> Subject:
    """timm's model ``name`` with random weights, for square images of ``img_size``; None uses the model's size.

    Raises:
        ValueError: timm does not know the model, or the model does not accept the arguments.
    """
    import timm

    import timm_plugin  # noqa: F401  registers our models

    if not timm.is_model(name):
        raise ValueError(f"--model is {name}; allowed: a name of timm.list_models(), or of lineartime's")
    sizes = {} if img_size is None else {"img_size": img_size}
    torch.manual_seed(1)
    try:
        try:
            model = timm.create_model(name, **kwargs, **sizes)
        except TypeError as error:  # convolutional networks accept any size without the argument
            if "img_size" not in str(error) or not sizes:
                raise
            model = timm.create_model(name, **kwargs)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"--model {name} with --model-kwargs {kwargs}: {error}; allowed: what it takes") from error
    channels, *size = model.default_cfg["input_size"]
    height, width = size if img_size is None else (img_size, img_size)
    return Subject(name, f"{height} x {width}", model, (torch.randn(batch, channels, height, width),), {})


def fairseq_subject(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes = DEFAULT) -> Subject:
    """fairseq's architecture ``name`` with random weights, as ``fairseq-train --arch NAME ARGUMENTS`` builds it.

    ``tokens`` is the maximum length: steps of a time series, three tokens per step of a Decision Transformer, tokens of
    the source and of the target of an encoder-decoder.

    Raises:
        ValueError: fairseq does not know the architecture, its kind is not supported here, or it refuses an option.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_plugin  # noqa: F401  registers our models

    if name not in ARCH_MODEL_REGISTRY:
        raise ValueError(f"--arch is {name}; allowed: an architecture of fairseq-train --user-dir fairseq_plugin")
    kind = _kind_of(ARCH_MODEL_REGISTRY[name])
    if kind is None:
        allowed = "a language model, masked model, encoder-decoder, classifier, time series or decision model"
        raise ValueError(f"--arch is {name}, a {ARCH_MODEL_REGISTRY[name].__name__}; allowed: {allowed}")
    return kind(name, tokens, arguments, sizes)


def _kind_of(model: type):
    """The function that builds a model of this class with an input; None if the class is not supported."""
    from fairseq.models import FairseqEncoderDecoderModel, FairseqLanguageModel
    from fairseq.models.roberta import RobertaModel

    from fairseq_plugin.models._classifier import LinearTimeClassifier
    from fairseq_plugin.models._decision import DecisionModel
    from fairseq_plugin.models._time_series import TimeSeriesClassifier

    kinds = {
        TimeSeriesClassifier: _time_series,
        DecisionModel: _decision,
        LinearTimeClassifier: _classifier,
        RobertaModel: _masked,
        FairseqLanguageModel: _language,
        FairseqEncoderDecoderModel: _translation,
    }
    return next((make for base, make in kinds.items() if issubclass(model, base)), None)


def _language(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    lengths = ("--tokens-per-sample", tokens)
    model = _built(name, "language_modeling", lengths, arguments, _symbols(sizes))
    return Subject(name, f"{tokens:,} tokens", model, (_words(tokens, sizes),), {})


def _masked(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    lengths = ("--tokens-per-sample", tokens)
    model = _built(name, "masked_lm", lengths, arguments, _symbols(sizes, tokens))
    return Subject(name, f"{tokens:,} tokens", model, (_words(tokens, sizes),), {})


def _classifier(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    lengths = ("--criterion", "sentence_prediction", "--max-positions", tokens, "--num-classes", sizes.classes)
    model = _built(name, "sentence_prediction", lengths, arguments, _symbols(sizes, tokens))
    model.register_classification_head("head", num_classes=sizes.classes)
    named = {"classification_head_name": "head"}
    return Subject(name, f"{tokens:,} tokens", model, (_words(tokens, sizes),), named)


def _translation(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    lengths = ("--max-source-positions", tokens, "--max-target-positions", tokens)
    model = _built(name, "translation", lengths, arguments, _symbols(sizes))
    words = _words(tokens, sizes)
    inputs = (words, torch.full((sizes.batch,), tokens), words)
    return Subject(name, f"{tokens:,} tokens, twice", model, inputs, {})


def _time_series(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    from fairseq_plugin.data.series_folder import Description

    labels = [str(i) for i in range(sizes.classes)]
    description = Description(labels, [0.0] * sizes.channels, [1.0] * sizes.channels, tokens)
    task = SimpleNamespace(description=description, max_length=tokens)
    model = _built(name, "time_series_classification", (), arguments, task)
    model.register_classification_head("head", sizes.classes)
    named = {"classification_head_name": "head"}
    return Subject(name, f"{tokens:,} steps", model, (torch.randn(sizes.batch, tokens, sizes.channels),), named)


def _decision(name: str, tokens: int, arguments: Sequence[str], sizes: Sizes) -> Subject:
    from fairseq_plugin.data.episode_folder import EpisodeDescription
    from fairseq_plugin.data.episodes import TOKENS

    steps = max(1, tokens // TOKENS)
    statistics = ([0.0] * sizes.state, [1.0] * sizes.state, [-1.0] * sizes.action, [1.0] * sizes.action)
    description = EpisodeDescription("random", "", *statistics, steps, 0.0, 0.0, 0.0)
    task = SimpleNamespace(description=description, context=steps, max_episode_length=max(1000, steps))
    model = _built(name, "offline_rl", (), arguments, task)
    window = {"returns": 1, "states": sizes.state, "actions": sizes.action}
    named = {key: torch.randn(sizes.batch, steps, size) for key, size in window.items()}
    named["timesteps"] = torch.arange(steps).expand(sizes.batch, steps)
    return Subject(name, f"{steps:,} steps, {TOKENS * steps:,} tokens", model, (), named)


def _built(name: str, task: str, lengths: Sequence[object], arguments: Sequence[str], stand_in: Any) -> nn.Module:
    """Build the model with ``stand_in`` instead of its task, so that no data is needed."""
    from fairseq import tasks

    from ..shared.fairseq_models import model_options

    model_config = model_options(("data", "--task", task, "--arch", name, *lengths, *arguments))
    torch.manual_seed(1)
    return tasks.FairseqTask.build_model(stand_in, model_config)


def _symbols(sizes: Sizes, longest: int = 0) -> SimpleNamespace:
    """A stand-in for a task with ``sizes.vocabulary`` symbols."""
    from fairseq.data import Dictionary

    symbols = Dictionary()
    if sizes.vocabulary <= len(symbols):
        raise ValueError(f"--vocabulary is {sizes.vocabulary}; allowed: above {len(symbols)}, fairseq's own symbols")
    for i in range(sizes.vocabulary - len(symbols)):
        symbols.add_symbol(f"w{i}")
    return SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols, max_positions=lambda: longest)


def _words(tokens: int, sizes: Sizes) -> torch.Tensor:
    return torch.randint(4, sizes.vocabulary, (sizes.batch, tokens), generator=torch.Generator().manual_seed(1))
