"""Recorded episodes on disk, and what training and acting need to know of them.

A folder holds ``SPLIT.npz`` for each split and ``episodes.json``, which is written last. An episode has T steps, each
with a state of S numbers, an action of A numbers and a reward; the steps of all episodes of a split follow one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.ops.shared.checks import shortened

from . import stored_arrays
from .stored_arrays import (
    as_float32,
    check_integers,
    check_numbers,
    check_real,
    check_reals,
    check_whole,
    read_arrays,
)

DESCRIPTION_FILE = "episodes.json"
TRAIN = "train"
#: By how much an action may be outside of its range, as rounding does.
_ROUNDING = 1e-4


class Episode(NamedTuple):
    """One episode from its first step on; ``states[t]`` is what was seen before ``actions[t]``."""

    states: np.ndarray  # (T, S)
    actions: np.ndarray  # (T, A)
    rewards: np.ndarray  # (T,)

    @property
    def total(self) -> float:
        """The return: the undiscounted sum of all rewards."""
        return float(np.sum(self.rewards, dtype=np.float64))


@dataclass(frozen=True)
class EpisodeDescription:
    """Description of the episodes that a model was trained on: data set, ranges and statistics.

    ``mean`` and ``std`` are of each number of a state over all training steps; every state is standardised with them.
    Actions are scaled from their range to the range of a model's tanh, -1 to 1.

    Raises:
        ValueError: a field with another type or an impossible value.
    """

    name: str  # of the data set
    environment: str  # gymnasium's name for it; empty where that is not known
    mean: list[float]  # (S,)
    std: list[float]  # (S,)
    low: list[float]  # (A,), the smallest action
    high: list[float]  # (A,), the largest
    longest: int  # steps of the longest training episode
    lowest: float  # return of a training episode
    average: float
    highest: float

    def __post_init__(self) -> None:
        for name in ("name", "environment"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {shortened(getattr(self, name))}; allowed: a text")
        check_reals("mean", self.mean)
        check_reals("std", self.std, least=0.0, count=len(self.mean))
        check_reals("low", self.low)
        check_reals("high", self.high, count=len(self.low))
        for i, (low, high) in enumerate(zip(self.low, self.high)):
            check_real(f"high[{i}]", high, above=low)
        check_whole("longest", self.longest)
        for name in ("lowest", "average", "highest"):
            check_real(name, getattr(self, name))

    @property
    def state_size(self) -> int:
        """S."""
        return len(self.mean)

    @property
    def action_size(self) -> int:
        """A."""
        return len(self.low)

    def standardise(self, states: np.ndarray, where: str = "states") -> np.ndarray:
        """States (..., S) minus the mean, over the deviation + 1e-6, as float32.

        Raises:
            ValueError: a value that is then infinite; the message says ``where``.
        """
        std = np.asarray(self.std) + 1e-6
        with np.errstate(over="ignore"):
            standardised = (states - np.asarray(self.mean)) / std
        return as_float32(where, standardised, states)

    def scale(self, actions: np.ndarray) -> np.ndarray:
        """Actions (..., A) of the environment -> -1 to 1, float32."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        return (2.0 * (actions - low) / (high - low) - 1.0).astype(np.float32)

    def unscale(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of ``scale``, float32."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        return (low + 0.5 * (actions + 1.0) * (high - low)).astype(np.float32)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and checkpoints hold them."""
        return asdict(self)


def write_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Episode]],
    name: str,
    environment: str = "",
    action_range: tuple[Sequence[float], Sequence[float]] | None = None,
) -> EpisodeDescription:
    """Write splits into an empty ``folder``; "train" is one of them. ``action_range`` is by default -1 to 1.

    Raises:
        ValueError: no episodes, one that is none (see ``check_episode``), of other sizes than the others, or with an
            action outside of its range; a range that is none.
    """
    if TRAIN not in splits:
        raise ValueError(f"splits are {', '.join(splits) or 'none'}; allowed: {TRAIN!r} and others")
    for split, episodes in splits.items():
        if not len(episodes):
            raise ValueError(f"{split} has 0 episodes; allowed: at least 1")
    sizes, checked = None, {}
    for split, episodes in splits.items():
        checked[split] = []
        for i, one in enumerate(episodes):
            checked[split].append(check_episode(one, f"episode {i} of {split}", sizes))
            sizes = sizes or (one.states.shape[1], one.actions.shape[1])
    low, high = _checked_range(action_range, sizes[1])
    for split, episodes in checked.items():
        for i, one in enumerate(episodes):
            _check_in_range(one.actions, low, high, f"episode {i} of {split}")
    described = _describe(checked[TRAIN], name, environment, low, high)
    folder.mkdir(parents=True, exist_ok=True)
    for split, episodes in checked.items():
        arrays = {key: np.concatenate([getattr(one, key) for one in episodes]) for key in Episode._fields}
        np.savez(folder / f"{split}.npz", lengths=[len(one.rewards) for one in episodes], **arrays)
    stored_arrays.write_description(described, folder / DESCRIPTION_FILE)
    return described


def read_description(folder: Path) -> EpisodeDescription:
    """The description in a folder.

    Raises:
        ValueError: the folder has none, or one that is none.
    """
    return stored_arrays.read_description(
        EpisodeDescription, folder / DESCRIPTION_FILE, "recipes.offline_rl.prepare or .collect"
    )


def read_split(folder: Path, name: str) -> list[Episode]:
    """The episodes of a split of a folder.

    Raises:
        ValueError: the folder lacks it, or its file is damaged; the message names the file and the field.
    """
    described, path = read_description(folder), folder / f"{name}.npz"
    fields = (*Episode._fields, "lengths")
    *arrays, lengths = read_arrays(folder, name, fields, "a file of recipes.offline_rl.prepare or .collect")
    check_integers(f"{path}: lengths", lengths, least=1, most=len(arrays[2]) if arrays[2].ndim else 0)
    steps = int(lengths.sum())
    shapes = ((steps, described.state_size), (steps, described.action_size), (steps,))
    for field, array, shape in zip(fields, arrays, shapes):
        check_numbers(f"{path}: {field}", array, shape)
    ends = np.cumsum(lengths)[:-1]
    return [Episode(*parts) for parts in zip(*(np.split(x, ends) for x in arrays))]


def check_episode(episode: Episode, where: str, sizes: tuple[int, int] | None = None) -> Episode:
    """``episode`` as arrays of float32; ``sizes`` are S and A, if they are known.

    Raises:
        ValueError: discrete actions, other shapes or sizes, no step, NaN or an infinite value; it says ``where``.
    """
    if np.asarray(episode.actions).dtype.kind in "iub":
        raise ValueError(f"{where} has discrete actions (integers); allowed: real numbers, (steps, numbers)")
    state_size, action_size = sizes or (None, None)
    states = _checked_array(f"{where}: states", episode.states, None, state_size)
    actions = _checked_array(f"{where}: actions", episode.actions, len(states), action_size)
    return Episode(states, actions, _checked_array(f"{where}: rewards", episode.rewards, len(states)))


def _checked_array(where: str, values: Any, *wanted: int | None) -> np.ndarray:
    """``values`` as finite float32 of the shape ``wanted``, in which None is any size of at least 1."""
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be read as numbers: {error}; allowed: arrays") from error
    sizes = zip(array.shape, wanted)
    if array.ndim != len(wanted) or not all(size and allowed in (None, size) for size, allowed in sizes):
        allowed = ", ".join("at least 1" if size is None else str(size) for size in wanted)
        raise ValueError(f"{where} have shape {array.shape}; allowed: ({allowed})")
    if not np.isfinite(array).all():
        step = int(np.argwhere(~np.isfinite(array))[0][0])
        raise ValueError(f"{where} have a value that is not finite at step {step}; allowed: finite numbers in float32")
    return array


def _checked_range(given: tuple[Sequence[float], Sequence[float]] | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.broadcast_to(np.asarray(x, dtype=np.float64), size) for x in given or (-1.0, 1.0))
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
    states = np.concatenate([one.states for one in train]).astype(np.float64)
    totals = [one.total for one in train]
    return EpisodeDescription(
        name=name,
        environment=environment,
        mean=states.mean(axis=0).tolist(),
        std=states.std(axis=0).tolist(),
        low=low.tolist(),
        high=high.tolist(),
        longest=max(len(one.rewards) for one in train),
        lowest=min(totals),
        average=float(np.mean(totals)),
        highest=max(totals),
    )
