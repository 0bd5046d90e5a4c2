"""Offline reinforcement learning: ``fairseq-train --user-dir fairseq_plugin --task offline_rl``.

A model learns from recorded episodes to predict the action from the return that followed. Later it acts given a wanted
return. Training and checkpoints are fairseq's own.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import nn

from common.ops.shared.checks import check_positive_int

from ..criterions import action_mse, awac  # noqa: F401  registers the criteria
from ..data.episode_folder import EpisodeDescription, read_description, read_split
from ..data.episodes import EpisodeDataset
from ..data.stored_arrays import described_by
from ..loading.known_options import flag_of, option_field
from ..models._decision import DecisionModel
from ..models.decision_hub_interface import FULL
from ._checks import check_architecture, name_of

logger = logging.getLogger(__name__)


@dataclass
class OfflineRLConfig(FairseqDataclass):
    """Options of ``offline_rl``, with the authors' defaults."""

    data: str = option_field(MISSING, "folder that recipes.offline_rl.data or .collect has written")
    context: str = option_field("20", "steps of a window; full: whole episodes")
    return_scale: float = option_field(1000.0, "returns are divided by it before they are embedded")
    max_episode_length: int = option_field(1000, "steps that the model has embeddings for")
    windows_per_epoch: int = option_field(
        640_000, "windows that are drawn for an epoch; the default is 10,000 batches of 64"
    )
    seed: int = II("common.seed")


@register_task("offline_rl", dataclass=OfflineRLConfig)
class OfflineRLTask(FairseqTask):
    """Windows of recorded episodes, standardised with the statistics of the training episodes.

    The statistics are the task's state: a checkpoint stores them, and acting uses the stored ones.
    """

    def __init__(self, cfg: OfflineRLConfig, **kwargs) -> None:
        super().__init__(cfg)
        for name in ("max_episode_length", "windows_per_epoch"):
            check_positive_int(flag_of(name), getattr(cfg, name))
        if not 0.0 < cfg.return_scale < math.inf:
            raise ValueError(f"--return-scale is {cfg.return_scale}; allowed: above 0 and finite")
        #: The criterion that trains the model; the model is built before the criterion.
        self.wanted_criterion = DecisionModel.criterion
        #: Steps of a window; None for whole episodes.
        self.context = read_context("--context", cfg.context)
        self.state.add_factory("description", lambda: read_description(Path(cfg.data)).as_dict())

    @property
    def description(self) -> EpisodeDescription:
        """The description of the episodes that the model is, or was, trained on."""
        return described_by(EpisodeDescription, self.state.description, "the task's state in the checkpoint")

    @property
    def max_episode_length(self) -> int:
        """The number of steps that the model has embeddings for."""
        return self.cfg.max_episode_length

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Load a split.

        Raises:
            ValueError: the split is missing or damaged, or its episodes have other sizes than in the training of the
                model, or more steps than it has embeddings for.
        """
        folder, described, limit = Path(self.cfg.data), self.description, self.max_episode_length
        episodes = read_split(folder, split)
        sizes = (episodes[0].states.shape[1], episodes[0].actions.shape[1])
        if sizes != (described.state_size, described.action_size):
            raise ValueError(
                f"{folder} has states and actions of {sizes[0]} and {sizes[1]} numbers; allowed: "
                f"{described.state_size} and {described.action_size}"
            )
        for i, episode in enumerate(episodes):
            if len(episode.rewards) > limit:
                raise ValueError(
                    f"episode {i} of {split} has {len(episode.rewards)} steps; allowed: at most {limit}, "
                    "--max-episode-length"
                )
        steps = sum(len(episode.rewards) for episode in episodes)
        logger.info(f"{split}: {len(episodes)} episodes of {described.name}, {steps} steps")
        self.datasets[split] = EpisodeDataset(
            episodes,
            described,
            context=self.context,
            return_scale=self.cfg.return_scale,
            count=self.cfg.windows_per_epoch,
            seed=self.cfg.seed,
        )

    def build_model(self, cfg, from_checkpoint: bool = False) -> nn.Module:
        """fairseq's hook: the model.

        Raises:
            ValueError: the architecture is no model of this task.
        """
        self.wanted_criterion = check_architecture(cfg, DecisionModel, "offline_rl").criterion
        return super().build_model(cfg, from_checkpoint)

    def build_criterion(self, cfg, from_checkpoint: bool = False) -> FairseqCriterion:
        """fairseq's hook: the criterion.

        Raises:
            ValueError: it is not the criterion of the model.
        """
        name = name_of(cfg, "criterion")
        if name != self.wanted_criterion:
            raise ValueError(
                f"--criterion is {name}; allowed with --task offline_rl and this --arch: {self.wanted_criterion}"
            )
        return super().build_criterion(cfg, from_checkpoint)

    def max_positions(self) -> None:
        """fairseq's hook: None, so no window is filtered out."""
        return None

    @property
    def source_dictionary(self) -> None:
        """None: inputs are numbers."""
        return None

    @property
    def target_dictionary(self) -> None:
        """None: an action is a vector of numbers."""
        return None


def read_context(option: str, text: str) -> int | None:
    """Parse the window length ``text`` of ``option``; None for "full", whole episodes.

    Raises:
        ValueError: it is neither "full" nor an integer of at least 1.
    """
    if text == FULL:
        return None
    if not str(text).isdecimal() or int(text) < 1:
        raise ValueError(f"{option} is {text}; allowed: {FULL}, or an integer of at least 1")
    return int(text)
