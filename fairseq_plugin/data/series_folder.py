"""Labelled time series on disk, with the description that training needs.

A folder holds ``SPLIT.npz`` for each split and ``series.json``, which is written last. A series has T steps of C
channels; the series of a split are concatenated in one array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.ops.shared.checks import shortened

from . import stored_arrays
from .stored_arrays import TRAIN, ArrayFolder, check_integers, check_splits, finite_array

#: The types of labels, which files preserve.
Label = str | int


class Split(NamedTuple):
    """The series of a split, (T, C) each in float64, and the label of each."""

    series: list[np.ndarray]
    labels: list[Label]


@dataclass(frozen=True)
class Description(stored_arrays.Description):
    """Description of the series that a model was trained on: their labels, statistics and largest length.

    ``mean`` and ``std`` are over all steps of the training series, for each channel; series are standardised with them.
    A channel that is constant in the training series has a deviation of 1.

    Raises:
        ValueError: a field has a wrong type or an impossible value.
    """

    labels: list[Label]  # the classes, in the order of the scores
    mean: list[float]  # (C,)
    std: list[float]  # (C,), with T - 1 in the denominator, as in the authors' code
    longest: int  # steps of the longest training series

    epsilon = float(np.finfo(np.float64).eps)

    def __post_init__(self) -> None:
        if not self.labels or len({type(label) for label in self.labels}) > 1 or len({*self.labels}) < len(self.labels):
            shown = shortened(self.labels)
            raise ValueError(f"labels is {shown}; allowed: all strings, or all integers, each of them once")
        self.check_statistics(above=0.0)

    @property
    def channels(self) -> int:
        """C."""
        return len(self.mean)

    def class_of(self, label: Any, where: str) -> int:
        """The class of a label; ValueError that names ``where`` for a label that was not in the training series."""
        if label not in self.labels:
            raise ValueError(f"{where} has the label {label!r}; allowed: {', '.join(map(repr, self.labels))}")
        return self.labels.index(label)


_FOLDER = ArrayFolder(
    file="series.json",
    description=Description,
    writers="recipes.time_series.data",
    step_fields={"steps": "channels"},
    item_fields=("classes",),
)
read_description = _FOLDER.read_description


def describe(train: Split) -> Description:
    """The description of training series."""
    steps = np.concatenate(train.series)  # (sum of T, C)
    with np.errstate(over="ignore"):  # Description refuses infinite values
        mean, std = steps.mean(axis=0), steps.std(axis=0, ddof=1) if len(steps) > 1 else np.zeros(steps.shape[1])
    return Description(
        labels=sorted(set(train.labels)),
        mean=mean.tolist(),
        std=np.where(std > 0.0, std, 1.0).tolist(),
        longest=max(map(len, train.series)),
    )


def write_folder(folder: Path, splits: Mapping[str, tuple[Sequence[Any], Sequence[Label]]]) -> Description:
    """Write splits (series (T, C) and their labels), among them "train", into an empty ``folder``.

    Raises:
        ValueError: a series is invalid (see ``check_series``) or has another number of channels, the numbers of series
            and labels differ, or a label does not occur in the training series.
    """
    check_splits(splits)
    checked = {TRAIN: _checked_split(TRAIN, *splits[TRAIN], channels=None)}
    description = describe(checked[TRAIN])
    arrays = {}
    for name, split in splits.items():
        series, labels = checked.get(name) or _checked_split(name, *split, description.channels)
        classes = [description.class_of(label, f"series {i} of {name}") for i, label in enumerate(labels)]
        arrays[name] = {"steps": series, "classes": classes}
    _FOLDER.write(folder, description, arrays)
    return description


def read_split(folder: Path, name: str) -> Split:
    """Read a split of a folder.

    Raises:
        ValueError: the split is missing or its file is damaged; the message names the file and the field.
    """
    description, arrays = _FOLDER.read_split(folder, name)
    path, classes, series = folder / f"{name}.npz", arrays["classes"], arrays["steps"]
    check_integers(f"{path}: classes", classes, least=0, most=len(description.labels) - 1)
    if len(classes) != len(series):
        raise ValueError(f"{path}: classes has {len(classes)} values and lengths {len(series)}; allowed: as many")
    return Split([steps.astype(np.float64) for steps in series], [description.labels[i] for i in classes])


def check_series(series: Any, where: str, channels: int | None = None) -> np.ndarray:
    """``series`` as an array (T, C) in float64.

    Raises:
        ValueError: it is no such array, is empty, does not have ``channels`` channels, or holds NaN or an infinite
            value; the message names ``where``.
    """
    return finite_array(where, series, np.float64, (None, channels), " (fill_missing interpolates over NaN)")


def fill_missing(series: np.ndarray) -> np.ndarray:
    """Series (T, C) with NaN interpolated linearly over time, and replaced by the nearest value at the ends.

    Raises:
        ValueError: a channel has only NaN.
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
    for i, values in enumerate(series):
        checked.append(check_series(values, f"series {i} of {name}", channels))
        channels = checked[0].shape[1]
    return Split(checked, labels)
