"""Classification of time series: ``fairseq-train --user-dir fairseq_plugin --task time_series_classification``.

A series is T steps of C real numbers. Training, validation, checkpoints and the criterion ``sentence_prediction`` are
fairseq's own.
"""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Optional

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import MISSING
from torch import nn

from common.ops.shared.checks import check_positive_int

from ..data.series_folder import Description, read_description, read_split
from ..data.stored_arrays import described_by
from ..data.time_series import TimeSeriesDataset
from ..loading.known_options import option_field
from ..models._time_series import TimeSeriesClassifier
from ._checks import check_architecture, check_classification

logger = logging.getLogger(__name__)


@dataclass
class TimeSeriesClassificationConfig(FairseqDataclass):
    """Options of ``time_series_classification``."""

    data: str = option_field(MISSING, "folder that recipes.time_series.data has written")
    max_length: Optional[int] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None,
        "steps that the model has positions for; longer series are cut after so many. Default: those of "
        "the longest training series, as in the authors' code",
    )
    # Not read from the criterion as in fairseq's own tasks: the default criterion, cross_entropy, lacks the option.
    classification_head_name: str = option_field(
        "sentence_classification_head", "name of the classification head to use"
    )


@register_task("time_series_classification", dataclass=TimeSeriesClassificationConfig)
class TimeSeriesClassificationTask(FairseqTask):
    """Series with one label each, standardised with the statistics of the training series.

    The statistics and the labels are the task's state: a checkpoint stores them, and evaluation and prediction use the
    stored ones, for any data folder.
    """

    def __init__(self, cfg: TimeSeriesClassificationConfig, **kwargs) -> None:
        super().__init__(cfg)
        if cfg.max_length is not None:
            check_positive_int("--max-length", cfg.max_length)
        self.state.add_factory("description", lambda: read_description(Path(cfg.data)).as_dict())

    @property
    def description(self) -> Description:
        """The description of the series that the model is, or was, trained on."""
        return described_by(Description, self.state.description, "the task's state in the checkpoint")

    @property
    def max_length(self) -> int:
        """The number of steps that the model has positions for."""
        return self.cfg.max_length or self.description.longest

    @cached_property
    def label_dictionary(self) -> Dictionary:
        """The labels as a dictionary, for fairseq's criterion."""
        dictionary = Dictionary()
        for label in self.description.labels:
            dictionary.add_symbol(str(label))
        return dictionary

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Load a split, standardised and cut to ``max_length``; logs how many series were cut.

        Raises:
            ValueError: the split is missing or damaged, or its series have other channels or labels than in the
                training of the model.
        """
        folder, described = Path(self.cfg.data), self.description
        series, labels = read_split(folder, split)
        if series[0].shape[1] != described.channels:
            raise ValueError(f"{folder} has series of {series[0].shape[1]} channels; allowed: {described.channels}")
        classes = [described.class_of(label, f"series {i} of {split}") for i, label in enumerate(labels)]
        limit = self.max_length
        longer = sum(len(values) > limit for values in series)
        cut = f", {longer} of them cut after {limit} steps (--max-length)" if longer else ""
        logger.info(f"{split}: {len(series)} series of {described.channels} channels{cut}")
        tensors = [
            torch.from_numpy(described.standardise(values[:limit], f"series {i} of {split}"))
            for i, values in enumerate(series)
        ]
        self.datasets[split] = TimeSeriesDataset(tensors, classes)

    def build_model(self, cfg, from_checkpoint: bool = False) -> nn.Module:
        """fairseq's hook: the model, with a head for the labels.

        Raises:
            ValueError: the architecture is no classifier of time series.
        """
        check_architecture(cfg, TimeSeriesClassifier, "time_series_classification")
        model = super().build_model(cfg, from_checkpoint)
        labels = self.description.labels
        model.register_classification_head(self.cfg.classification_head_name, len(labels), labels)
        return model

    def build_criterion(self, cfg, from_checkpoint: bool = False) -> FairseqCriterion:
        """fairseq's hook: the criterion.

        Raises:
            ValueError: it is not ``sentence_prediction``, names another head, or is for regression.
        """
        criterion = super().build_criterion(cfg, from_checkpoint)
        check_classification(criterion, cfg, "time_series_classification", self.cfg.classification_head_name)
        return criterion

    def max_positions(self) -> int:
        """fairseq's hook: the most steps of a series; longer ones are cut."""
        return self.max_length

    @property
    def source_dictionary(self) -> None:
        """None: inputs are numbers."""
        return None

    @property
    def target_dictionary(self) -> None:
        """None: a label is a class, not a sequence of symbols."""
        return None
