"""The model that a training builds, without memory and without data: its number of parameters, and its options."""

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .trainings import Training

#: Sizes of a time series (JapaneseVowels) and of an episode (HalfCheetah).
_CHANNELS, _CLASSES, _STEPS = 12, 9, 29
_STATE, _ACTION, _EPISODE = 17, 6, 1000


class _WithoutValues(TorchFunctionMode):
    """Skips the random initialisation of weights, which is slow on the meta device and has no effect there.

    RoBERTa draws its weights on the CPU, to which tensors of the meta device cannot be copied.
    """

    DRAWING = frozenset({"cpu", "add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensor = next(iter((*args, *kwargs.values())), None)
        if getattr(func, "__name__", "") in self.DRAWING and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **kwargs)


@contextmanager
def _without_memory() -> Iterator[None]:
    with torch.device("meta"), _WithoutValues():
        yield


def count_parameters(training: Training) -> int | None:
    """Parameters of the model of the first training command; None for a method that is no network.

    Raises:
        ValueError: the host knows no such model, or refuses an option.
    """
    if not training.host:
        return None
    model = _timm_model(training.model) if training.host == "timm" else fairseq_model(training)
    return sum(parameter.numel() for parameter in model.parameters())


def timm_arguments(model: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a timm model, from "NAME --model-kwargs NAME=VALUE ..." as train.py accepts it."""
    from timm.utils import ParseKwargs

    name, _, options = model.partition(" --model-kwargs ")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    return name, parser.parse_args(["--model-kwargs", *options.split()] if options else []).model_kwargs


def _timm_model(model: str) -> nn.Module:
    import timm

    import timm_plugin  # noqa: F401  registers our models

    name, kwargs = timm_arguments(model)
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name}")
    with _without_memory():
        return timm.create_model(name, **kwargs)


def fairseq_options(training: Training) -> argparse.Namespace:
    """Options of the first fairseq-train command of a training, including those that its architecture sets.

    Raises:
        ValueError: fairseq has no such architecture.
    """
    from ..shared.fairseq_models import parsed_options

    return parsed_options(_fairseq_command(training))


def fairseq_model(training: Training) -> nn.Module:
    """The model that the first fairseq-train command of a training builds; without such a command, its architecture.

    Raises:
        ValueError: fairseq has no such architecture.
    """
    from fairseq import tasks

    from ..shared.fairseq_models import model_options

    parsed = model_options(_fairseq_command(training))
    with _without_memory():
        return tasks.FairseqTask.build_model(_task(parsed.task, training, parsed), parsed)


def _fairseq_command(training: Training) -> list[str]:
    """The arguments of the first fairseq-train command of a training."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    import fairseq_plugin  # noqa: F401  registers our models

    command = next((words for words in training.commands() if words[0] == "fairseq-train"), None)
    if command is None:  # nothing is trained: Table 3 of the Flowformer paper
        name, *options = training.model.split()
        command = ["fairseq-train", "data", "--task", "sentence_prediction", "--num-classes", "2", "--max-positions"]
        command += ["4096", "--criterion", "sentence_prediction", "--arch", name, *options]
    architecture = command[command.index("--arch") + 1]
    if architecture not in ARCH_MODEL_NAME_REGISTRY:
        raise ValueError(f"fairseq has no architecture {architecture}")
    return command[1:]


def _task(name: str, training: Training, parsed: argparse.Namespace) -> Any:
    """A stand-in for the task ``name`` without data: the attributes that are read when a model is built."""
    if name == "time_series_classification":
        from fairseq_plugin.data.series_folder import Description

        labels = [str(i) for i in range(_CLASSES)]
        described = Description(labels, [0.0] * _CHANNELS, [1.0] * _CHANNELS, _STEPS)
        return SimpleNamespace(description=described, max_length=_STEPS)
    if name == "offline_rl":
        from fairseq_plugin.data.episode_folder import EpisodeDescription

        state, action = ([0.0] * _STATE, [1.0] * _STATE), ([-1.0] * _ACTION, [1.0] * _ACTION)
        described = EpisodeDescription("random", "", *state, *action, _EPISODE, 0.0, 0.0, 0.0)
        return SimpleNamespace(description=described, context=int(parsed.context), max_episode_length=_EPISODE)
    symbols = _dictionary(training.symbols)
    longest = getattr(parsed, "max_positions", None) or getattr(parsed, "tokens_per_sample", None)
    return SimpleNamespace(
        source_dictionary=symbols, target_dictionary=symbols, dictionary=symbols, max_positions=lambda: longest
    )


@functools.cache
def _dictionary(symbols: int) -> Any:
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for i in range(symbols - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return dictionary
