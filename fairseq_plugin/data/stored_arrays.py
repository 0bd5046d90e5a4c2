"""Folders of arrays with a JSON description, checked field by field."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from common.files.json_files import check_file, read, signed, typed
from common.files.tensor_files import check_parts
from common.ops.shared.checks import shortened

TRAIN = "train"


class Description:
    """Base of descriptions of training items: dataclasses with the ``mean`` and ``std`` of each number of a step."""

    mean: list[float]
    std: list[float]
    longest: int  # steps of the longest training item
    epsilon: ClassVar[float]  # added to ``std``

    def check_statistics(self, **bounds: float) -> None:
        """Raise ValueError for impossible values; ``bounds`` are arguments of ``check_reals`` for ``std``."""
        check_reals("mean", self.mean)
        check_reals("std", self.std, **bounds)
        check_reals("longest", [self.longest], least=1)
        if len(self.mean) != len(self.std):
            raise ValueError(f"std has {len(self.std)} numbers and mean {len(self.mean)}; allowed: as many")

    def standardise(self, steps: np.ndarray, where: str = "steps") -> np.ndarray:
        """Steps (..., numbers) minus the mean, divided by the deviation + ``epsilon``, as float32.

        Raises:
            ValueError: a result is infinite; the message names ``where``.
        """
        with np.errstate(over="ignore"):
            standardised = (steps - np.asarray(self.mean)) / (np.asarray(self.std) + self.epsilon)
        return as_float32(where, standardised, steps)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and checkpoints."""
        return asdict(self)


class ArrayFolder(NamedTuple):
    """A folder with a file ``SPLIT.npz`` for each split and a JSON description, which is written last.

    An item of a split has several steps. The steps of all items are concatenated in the arrays of ``step_fields``,
    and the array ``lengths`` has the number of steps of each item.
    """

    file: str
    description: type[Description]
    #: The commands that write such folders, for messages.
    writers: str
    #: Arrays of steps, each with the attribute of the description that is the size of a step; None for a step of one
    #: number, which has no axis.
    step_fields: Mapping[str, str | None]
    #: Arrays with one value per item.
    item_fields: tuple[str, ...] = ()

    def write(self, folder: Path, description: Description, splits: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Write the description, and for each split the arrays of its items, by field."""
        folder.mkdir(parents=True, exist_ok=True)
        for split, items in splits.items():
            arrays = {field: np.concatenate(items[field]) for field in self.step_fields}
            arrays |= {field: np.asarray(items[field]) for field in self.item_fields}
            arrays["lengths"] = np.array([len(item) for item in items[next(iter(self.step_fields))]])
            np.savez(folder / f"{split}.npz", **arrays)
        text = json.dumps(signed(description.as_dict()), indent=1, ensure_ascii=False)
        (folder / self.file).write_text(text + "\n", encoding="utf-8")

    def read_description(self, folder: Path) -> Any:
        """Read the description.

        Raises:
            ValueError: it is missing, damaged or of another kind; the message names the file and the field.
        """
        path, fields = folder / self.file, ", ".join(self.description.__dataclass_fields__)
        if not path.exists():
            raise ValueError(f"{folder} lacks {self.file}; allowed: a folder that {self.writers} has written")
        return described_by(self.description, read(path, f"JSON with {fields}"), str(path))

    def read_split(self, folder: Path, split: str) -> tuple[Any, dict[str, Any]]:
        """The description, and by field the arrays of each item of ``split`` and the values of the items.

        Raises:
            ValueError: the split is missing or its file is damaged; the message names the file and the field.
        """
        description, path = self.read_description(folder), folder / f"{split}.npz"
        names = (*self.step_fields, *self.item_fields, "lengths")
        *values, lengths = read_arrays(folder, split, names, f"a file of {self.writers}")
        arrays = dict(zip(names, values))
        check_integers(f"{path}: lengths", lengths, least=1, most=len(values[0]) if values[0].ndim else math.inf)
        for field, attribute in self.step_fields.items():
            shape = () if attribute is None else (getattr(description, attribute),)
            check_numbers(f"{path}: {field}", arrays[field], (int(lengths.sum()), *shape))
            arrays[field] = np.split(arrays[field], np.cumsum(lengths)[:-1])
        return description, arrays


def check_splits(splits: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``splits`` has one for training."""
    if TRAIN not in splits:
        raise ValueError(f"splits are {', '.join(splits) or 'none'}; allowed: {TRAIN!r} and others")


def read_arrays(folder: Path, split: str, names: Sequence[str], allowed: str) -> list[np.ndarray]:
    """The arrays ``names`` of ``folder``/``split``.npz; only arrays of plain values are read.

    Raises:
        ValueError: the split is missing, or its file is damaged, too large for the memory or lacks an array. The
            message says what is ``allowed``.
    """
    path = folder / f"{split}.npz"
    if not path.exists():
        splits = ", ".join(sorted(x.stem for x in folder.glob("*.npz")))
        raise ValueError(f"{folder} has no split {split}; allowed: {splits or 'none'}")
    return read_file(path, names, allowed)


def read_file(path: Path, names: Sequence[str], allowed: str) -> list[np.ndarray]:
    """The arrays ``names`` of a file of ``np.savez``; see ``read_arrays``."""
    check_file(path, allowed)
    try:
        check_parts(path)
        with np.load(path, allow_pickle=False) as stored:
            arrays = [stored[name] for name in names]
    except (ValueError, TypeError, KeyError, EOFError, OSError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {allowed}") from error
    for name, array in zip(names, arrays):
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {name} is no array; allowed: {allowed}")
    return arrays


def check_integers(where: str, values: np.ndarray, least: int, most: float = math.inf) -> None:
    """ValueError that names ``where`` unless ``values`` are one or more integers (N,) from ``least`` to ``most``."""
    bounds = f"{least} to {most}" if most < math.inf else f"at least {least}"
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise ValueError(f"{where} has shape {values.shape} and type {values.dtype}; allowed: integers (N,), {bounds}")
    wrong = values[(values < least) | (values > most)]
    if len(wrong):
        raise ValueError(f"{where} has {wrong[0]}; allowed: {bounds}")


def check_numbers(where: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    """ValueError that names ``where`` unless ``values`` are finite real numbers of ``shape``."""
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{where} has type {values.dtype}; allowed: real numbers")
    finite_array(where, values, values.dtype, shape)


def check_reals(name: str, values: Sequence[float], above: float = -math.inf, least: float = -math.inf) -> None:
    """ValueError unless the field ``name`` is one or more finite numbers above ``above`` and at least ``least``."""
    wrong = [value for value in values if not above < value < math.inf or value < least]
    if wrong or not values:
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name} is {shortened(wrong[0] if wrong else values)}; allowed: finite numbers{bound}")


def finite_array(where: str, values: Any, dtype: type, shape: Sequence[int | None], hint: str = "") -> np.ndarray:
    """``values`` as an array of finite numbers of ``shape``, where None is any size of at least 1.

    Raises:
        ValueError: they are no such array; the message names ``where``, and for a value that is not finite, ``hint``.
    """
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be read as numbers: {error}; allowed: an array") from error
    sizes = zip(array.shape, shape)
    if array.ndim != len(shape) or not all(size and allowed in (None, size) for size, allowed in sizes):
        allowed = ", ".join("at least 1" if size is None else str(size) for size in shape)
        raise ValueError(f"{where} has shape {array.shape}; allowed: ({allowed})")
    index = _not_finite(array)
    if index is not None:
        raise ValueError(f"{where} is {array[index]} at {index}; allowed: finite numbers in {array.dtype}{hint}")
    return array


def as_float32(where: str, values: np.ndarray, source: np.ndarray) -> np.ndarray:
    """``values`` as float32; the message shows the value of ``source`` from which a value was computed.

    Raises:
        ValueError: a value overflows float32.
    """
    with np.errstate(over="ignore"):
        cast = values.astype(np.float32)
    index = _not_finite(cast)
    if index is not None:
        at, largest = f" at {index}" if index else "", np.finfo(np.float32).max
        raise ValueError(
            f"{where} is {np.broadcast_to(source, cast.shape)[index]:g}{at}, which is {values[index]:g} for the model; "
            f"allowed: what is finite in float32, up to {largest:.2g}"
        )
    return cast


def described_by(kind: type[Description], content: Any, where: str) -> Any:
    """The description of the dataclass ``kind`` whose fields are in the dictionary ``content``.

    Raises:
        ValueError: the content does not fit; the message names its source ``where``.
    """
    try:
        return typed(content, kind, "it")
    except (ValueError, OverflowError) as error:
        fields = ", ".join(kind.__dataclass_fields__)
        raise ValueError(f"{where} cannot be read: {error} (fields: {fields})") from error


def _not_finite(values: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first value that is not finite; None if all are finite."""
    indices = np.argwhere(~np.isfinite(values))
    return tuple(indices[0].tolist()) if len(indices) else None
