"""Recorded episodes on disk, with the description that training and acting need.

A folder holds ``SPLIT.npz`` for each split and ``episodes.json``, which is written last. An episode has T steps, each
with a state of S numbers, an action of A numbers and a reward; the episodes of a split are concatenated along steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .stored_arrays import (
    TRAIN,
    ArrayFolder,
    Description,
    check_reals,
    check_splits,
    finite_array,
)

#: The tolerance for actions outside of their range due to rounding.
_ROUNDING = 1e-4


class Episode(NamedTuple):
    """One episode from its first step; ``states[t]`` was observed before ``actions[t]``."""

    states: np.ndarray  # (T, S)
    actions: np.ndarray  # (T, A)
    rewards: np.ndarray  # (T,)

    @property
    def total(self) -> float:
        """The return: the undiscounted sum of all rewards."""
        return float(np.sum(self.rewards, dtype=np.float64))


@dataclass(frozen=True)
class EpisodeDescription(Description):
    """Description of the episodes that a model was trained on: dataset, ranges and statistics.

    ``mean`` and ``std`` are over all training steps, for each component of a state; states are standardised with them.
    Actions are scaled from their range to the range of the model's tanh, -1 to 1.

    Raises:
        ValueError: a field has a wrong type or an impossible value.
    """

    name: str  # of the data set
    environment: str  # gymnasium's name; empty if it is not known
    mean: list[float]  # (S,)
    std: list[float]  # (S,)
    low: list[float]  # (A,), the smallest action
    high: list[float]  # (A,), the largest
    longest: int  # steps of the longest training episode
    lowest: float  # the lowest return of a training episode
    average: float
    highest: float

    epsilon = 1e-6

    def __post_init__(self) -> None:
        self.check_statistics(least=0.0)
        check_reals("lowest, average or highest", [self.lowest, self.average, self.highest])
        check_reals("low", self.low)
        if len(self.low) != len(self.high):
            raise ValueError(f"high has {len(self.high)} numbers and low {len(self.low)}; allowed: as many")
        for i, (low, high) in enumerate(zip(self.low, self.high)):
            check_reals(f"high[{i}]", [high], above=low)

    @property
    def state_size(self) -> int:
        """S."""
        return len(self.mean)

    @property
    def action_size(self) -> int:
        """A."""
        return len(self.low)

    def scale(self, actions: np.ndarray) -> np.ndarray:
        """Actions (..., A) of the environment -> -1 to 1, float32."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        return (2.0 * (actions - low) / (high - low) - 1.0).astype(np.float32)

    def unscale(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of ``scale``, float32."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        return (low + 0.5 * (actions + 1.0) * (high - low)).astype(np.float32)


_FOLDER = ArrayFolder(
    file="episodes.json",
    description=EpisodeDescription,
    writers="recipes.offline_rl.data or .collect",
    step_fields={"states": "state_size", "actions": "action_size", "rewards": None},
)
read_description = _FOLDER.read_description


def write_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Episode]],
    name: str,
    environment: str = "",
    action_range: tuple[Sequence[float], Sequence[float]] | None = None,
) -> EpisodeDescription:
    """Write splits, among them "train", into an empty ``folder``. ``action_range`` is -1 to 1 by default.

    Raises:
        ValueError: a split has no episodes; an episode is invalid (see ``check_episode``), has other sizes than the
            others, or an action outside of its range; or the range is invalid.
    """
    check_splits(splits)
    sizes, checked = None, {}
    for split, episodes in splits.items():
        if not len(episodes):
            raise ValueError(f"{split} has 0 episodes; allowed: at least 1")
        checked[split] = []
        for i, episode in enumerate(episodes):
            checked[split].append(check_episode(episode, f"episode {i} of {split}", sizes))
            sizes = sizes or (checked[split][0].states.shape[1], checked[split][0].actions.shape[1])
    low, high = _checked_range(action_range, sizes[1])
    for split, episodes in checked.items():
        for i, episode in enumerate(episodes):
            _check_in_range(episode.actions, low, high, f"episode {i} of {split}")
    description = _describe(checked[TRAIN], name, environment, low, high)
    arrays = {split: dict(zip(Episode._fields, zip(*episodes))) for split, episodes in checked.items()}
    _FOLDER.write(folder, description, arrays)
    return description


def read_split(folder: Path, name: str) -> list[Episode]:
    """The episodes of a split of a folder.

    Raises:
        ValueError: the split is missing or its file is damaged; the message names the file and the field.
    """
    _, arrays = _FOLDER.read_split(folder, name)
    return [Episode(*parts) for parts in zip(*(arrays[field] for field in Episode._fields))]


def check_episode(episode: Episode, where: str, sizes: tuple[int, int] | None = None) -> Episode:
    """``episode`` as arrays of float32; ``sizes`` are S and A, if known.

    Raises:
        ValueError: discrete actions, wrong shapes or sizes, no step, NaN or an infinite value; the message names
            ``where``.
    """
    if np.asarray(episode.actions).dtype.kind in "iub":
        raise ValueError(f"{where} has discrete actions (integers); allowed: real numbers, (steps, numbers)")
    states, actions = sizes or (None, None)
    steps, arrays = None, []
    for name, values, shape in zip(Episode._fields, episode, ((states,), (actions,), ())):
        arrays.append(finite_array(f"{where}: {name}", values, np.float32, (steps, *shape)))
        steps = len(arrays[0])
    return Episode(*arrays)


def _checked_range(
    action_range: tuple[Sequence[float], Sequence[float]] | None, size: int
) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.broadcast_to(np.asarray(x, dtype=np.float64), size) for x in action_range or (-1.0, 1.0))
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(f"the range of actions is {low.tolist()} to {high.tolist()}; allowed: finite, low below high")
    return low, high


def _check_in_range(actions: np.ndarray, low: np.ndarray, high: np.ndarray, where: str) -> None:
    outside = (actions < low - _ROUNDING) | (actions > high + _ROUNDING)
    if outside.any():
        step, number = np.argwhere(outside)[0]
        raise ValueError(
            f"{where}: number {number} of the action at step {step} is {actions[step, number]}; allowed: "
            f"{low[number]} to {high[number]}, or give another range of actions"
        )


def _describe(
    train: Sequence[Episode], name: str, environment: str, low: np.ndarray, high: np.ndarray
) -> EpisodeDescription:
    states = np.concatenate([episode.states for episode in train]).astype(np.float64)
    totals = [episode.total for episode in train]
    return EpisodeDescription(
        name=name,
        environment=environment,
        mean=states.mean(axis=0).tolist(),
        std=states.std(axis=0).tolist(),
        low=low.tolist(),
        high=high.tolist(),
        longest=max(len(episode.rewards) for episode in train),
        lowest=min(totals),
        average=float(np.mean(totals)),
        highest=max(totals),
    )
