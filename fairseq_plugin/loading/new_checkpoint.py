"""Checkpoints as fairseq-train writes them, of models that it has not trained."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

#: The criterion of a training for each task, by the name that fairseq stores; others have ``_CRITERION``.
_CRITERIA = {"masked_lm": "MaskedLmLoss", "translation": "LabelSmoothedCrossEntropyCriterion"}
_CRITERION = "CrossEntropyCriterion"


def new_configuration(command: Iterable[object], overrides: Mapping[str, Any] | None = None) -> DictConfig:
    """fairseq's configuration for the arguments ``command`` of fairseq-train.

    ``overrides`` replace options of the model after its architecture has completed them.

    Raises:
        SystemExit: fairseq does not accept an option; it has printed why.
    """
    parsed = options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in command])
    config = convert_namespace_to_omegaconf(parsed)
    for name, value in (overrides or {}).items():
        if isinstance(config.model, argparse.Namespace):  # a model without a dataclass of options
            setattr(config.model, name, value)
        else:
            with open_dict(config.model):
                config.model[name] = value
    return config


def new_checkpoint(config: DictConfig, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The content of a checkpoint with ``weights`` before the first update, for all tools of fairseq."""
    content = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    task = content["task"]
    name = task.get("_name") if isinstance(task, dict) else getattr(task, "_name", None)
    history = {"criterion_name": _CRITERIA.get(name, _CRITERION), "optimizer_name": "FairseqAdam", "num_updates": 0}
    extra = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2}, "val_loss": None}
    state = {"args": None, "cfg": content, "model": dict(weights), "criterion": None, "task_state": {}}
    return {**state, "optimizer_history": [{**history, "lr_scheduler_state": {"best": None}}], "extra_state": extra}


def numbered_dictionary(size: int) -> Dictionary:
    """A dictionary of ``size`` symbols, for a model without data; fairseq's own symbols count."""
    symbols = Dictionary()
    for i in range(size - len(symbols)):
        symbols.add_symbol(f"symbol{i}")
    return symbols
