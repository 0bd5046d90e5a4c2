"""Labelled time series on disk, and what training needs to know of them.

A folder holds ``SPLIT.npz`` for each split and ``series.json``, which is written last. A series has T steps of C
channels; the steps of all series of a split follow one another in one array.
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
    check_reals,
    check_whole,
    read_arrays,
)

DESCRIPTION_FILE = "series.json"
TRAIN = "train"
#: Labels that come back from a file as they were.
Label = str | int


class Split(NamedTuple):
    """The series of a split, (T, C) each in float64, and the label of each."""

    series: list[np.ndarray]
    labels: list[Label]


@dataclass(frozen=True)
class Description:
    """Description of the series that a model was trained on: their labels, statistics and largest length.

    ``mean`` and ``std`` are of each channel over all steps of the training series; every series is standardised with
    them. A channel that is constant in them has a deviation of 1.

    Raises:
        ValueError: a field with another type or an impossible value.
    """

    labels: list[Label]  # the classes, in the order of the scores
    mean: list[float]  # (C,)
    std: list[float]  # (C,), with T - 1 in the denominator, as in the authors' code
    longest: int  # steps of the longest training series

    def __post_init__(self) -> None:
        _check_labels(self.labels)
        check_reals("mean", self.mean)
        check_reals("std", self.std, above=0.0, count=len(self.mean))
        check_whole("longest", self.longest)

    @property
    def channels(self) -> int:
        """C."""
        return len(self.mean)

    def standardise(self, series: np.ndarray, where: str = "the series") -> np.ndarray:
        """Series (T, C) minus the mean, over the deviation, as float32.

        Raises:
            ValueError: a value that is then infinite; the message says ``where``.
        """
        std = np.asarray(self.std) + np.finfo(np.float64).eps
        with np.errstate(over="ignore"):
            standardised = (series - np.asarray(self.mean)) / std
        return as_float32(f"{where}, (step, channel),", standardised, series)

    def class_of(self, label: Any, where: str) -> int:
        """The class of a label; ValueError, which says ``where`` it was found, for one that was never seen."""
        if label not in self.labels:
            raise ValueError(f"{where} has the label {label!r}; allowed: {', '.join(map(repr, self.labels))}")
        return self.labels.index(label)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and checkpoints hold them."""
        return asdict(self)


def describe(train: Split) -> Description:
    """The description of training series."""
    steps = np.concatenate(train.series)  # (sum of T, C)
    with np.errstate(over="ignore"):  # an infinite one is no description
        mean, std = steps.mean(axis=0), steps.std(axis=0, ddof=1) if len(steps) > 1 else np.zeros(steps.shape[1])
    return Description(
        labels=sorted(set(train.labels)),
        mean=mean.tolist(),
        std=np.where(std > 0.0, std, 1.0).tolist(),
        longest=max(map(len, train.series)),
    )


def write_folder(folder: Path, splits: Mapping[str, tuple[Sequence[Any], Sequence[Label]]]) -> Description:
    """Write splits, each series (T, C) and their labels, into an empty ``folder``; "train" is one of the splits.

    Raises:
        ValueError: a series that is none (see ``check_series``) or that has another number of channels, as many labels
            as there are no series, or a label that no training series has.
    """
    if TRAIN not in splits:
        raise ValueError(f"splits are {', '.join(splits) or 'none'}; allowed: {TRAIN!r} and others")
    read = {TRAIN: _checked_split(TRAIN, *splits[TRAIN], channels=None)}
    described = describe(read[TRAIN])
    for name, (series, labels) in splits.items():
        if name != TRAIN:
            read[name] = _checked_split(name, series, labels, described.channels)
    classes = {
        name: [described.class_of(label, f"series {i} of {name}") for i, label in enumerate(split.labels)]
        for name, split in read.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in read.items():
        lengths = np.array([len(x) for x in split.series])
        np.savez(folder / f"{name}.npz", steps=np.concatenate(split.series), lengths=lengths, classes=classes[name])
    stored_arrays.write_description(described, folder / DESCRIPTION_FILE)
    return described


def read_description(folder: Path) -> Description:
    """The description in a folder.

    Raises:
        ValueError: the folder has none, or one that is none.
    """
    return stored_arrays.read_description(Description, folder / DESCRIPTION_FILE, "recipes.time_series.prepare")


def read_split(folder: Path, name: str) -> Split:
    """A split of a folder.

    Raises:
        ValueError: the folder lacks it, or its file is damaged; the message names the file and the field.
    """
    described, path = read_description(folder), folder / f"{name}.npz"
    fields = ("steps", "lengths", "classes")
    steps, lengths, classes = read_arrays(folder, name, fields, "a file of recipes.time_series.prepare")
    check_integers(f"{path}: lengths", lengths, least=1, most=len(steps) if steps.ndim else 0)
    check_integers(f"{path}: classes", classes, least=0, most=len(described.labels) - 1)
    if len(classes) != len(lengths):
        raise ValueError(f"{path}: classes has {len(classes)} values and lengths {len(lengths)}; allowed: as many")
    check_numbers(f"{path}: steps", steps, (int(lengths.sum()), described.channels))
    series = np.split(steps.astype(np.float64), np.cumsum(lengths)[:-1])
    return Split(series, [described.labels[i] for i in classes])


def check_series(series: Any, where: str, channels: int | None = None) -> np.ndarray:
    """``series`` as an array (T, C) in float64.

    Raises:
        ValueError: it is not that, is empty, has another number of channels than ``channels``, or holds NaN or an
            infinite value; the message says ``where``.
    """
    try:
        values = np.asarray(series, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be read as numbers: {error}; allowed: an array (steps, channels)") from error
    wanted = "channels of at least 1" if channels is None else f"channels {channels}"
    if values.ndim != 2 or 0 in values.shape or channels not in (None, values.shape[1]):
        raise ValueError(f"{where} has shape {values.shape}; allowed: (steps, channels), steps of at least 1, {wanted}")
    if not np.isfinite(values).all():
        step, channel = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(
            f"{where} is {values[step, channel]} at step {step}, channel {channel}; allowed: finite numbers "
            "(fill_missing interpolates over NaN)"
        )
    return values


def fill_missing(series: np.ndarray) -> np.ndarray:
    """Series (T, C) with each NaN interpolated linearly between its neighbours in time; at the ends the nearest value.

    Raises:
        ValueError: a channel has nothing but NaN.
    """
    filled = np.array(series, dtype=np.float64)
    steps = np.arange(len(filled))
    for channel, values in enumerate(filled.T):
        missing = np.isnan(values)
        if missing.all() and len(values):
            raise ValueError(f"channel {channel} has no value at all; allowed: at least one of {len(values)} steps")
        if missing.any():
            values[missing] = np.interp(steps[missing], steps[~missing], values[~missing])
    return filled


def _checked_split(name: str, series: Sequence[Any], labels: Sequence[Label], channels: int | None) -> Split:
    if len(series) != len(labels) or not len(series):
        raise ValueError(f"{name} has {len(series)} series and {len(labels)} labels; allowed: as many, at least 1")
    labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
    for i, label in enumerate(labels):
        if type(label) is not type(labels[0]) or not isinstance(label, (str, int)):
            raise ValueError(f"the label of series {i} of {name} is {label!r}; allowed: all strings, or all integers")
    checked: list[np.ndarray] = []
    for i, one in enumerate(series):
        checked.append(check_series(one, f"series {i} of {name}", channels))
        channels = checked[0].shape[1]
    return Split(checked, labels)


def _check_labels(labels: Any) -> None:
    """ValueError unless the field is a list of strings, or of integers, each of them once."""
    if not isinstance(labels, list) or not labels:
        raise ValueError(f"labels is {shortened(labels)}; allowed: a list of at least 1")
    for i, label in enumerate(labels):
        if type(label) is not type(labels[0]) or type(label) not in (str, int) or label in labels[:i]:
            raise ValueError(
                f"labels[{i}] is {shortened(label)}; allowed: all strings, or all integers, each of them once"
            )
